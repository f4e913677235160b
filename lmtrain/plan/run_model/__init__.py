"""How this program's own runs are modelled: ranks, memory, a replay of a step."""
