"""`lmtrain reshard` and `verify`: convert and check checkpoints."""
