"""Models that describe how they may be sharded, and their losses; independent of processes."""
