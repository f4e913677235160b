"""`lmtrain pretrain`: settings, sweeps, one attempt of a run, its summary."""
