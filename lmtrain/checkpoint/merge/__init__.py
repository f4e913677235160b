"""Several checkpoints of one model merged into one: a weighted mean of their weights, in bounded memory."""
