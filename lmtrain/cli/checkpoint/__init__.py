"""`lmtrain import`, `export`, `reshard`, `merge` and `verify`: make, convert and check checkpoints."""
