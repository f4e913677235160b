"""`lmtrain trace`: where the time of a run's steps went."""
