"""Facts that all ranks of a run must share, and their comparison."""
