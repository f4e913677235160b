"""What lies in the folder of a run: one reader and one writer of each file."""
