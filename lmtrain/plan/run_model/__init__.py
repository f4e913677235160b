"""The planner's model of this program's own runs: ranks, memory, a replayed step."""
