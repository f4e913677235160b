"""What all ranks of a run must have alike, and how it is compared."""
