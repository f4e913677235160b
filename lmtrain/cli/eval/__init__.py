"""`lmtrain eval`: a checkpoint, its tasks, and comparisons of results."""
