"""The planner's model of lmtrain's own runs: ranks, memory, a simulated step."""
