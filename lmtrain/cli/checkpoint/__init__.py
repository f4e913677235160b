"""`lmtrain import`, `export`, `reshard` and `verify`: make, convert and check checkpoints."""
