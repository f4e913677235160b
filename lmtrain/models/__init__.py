"""Models that describe how they may be split and know nothing of processes."""
