"""Who of a run's processes stands still, and what is done about it."""
