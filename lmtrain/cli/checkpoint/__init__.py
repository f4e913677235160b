"""`lmtrain reshard` and `verify`: what is done with a checkpoint that is not training."""
