"""Detection of ranks and links that are slower than their peers."""
