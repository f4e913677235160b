"""`lmtrain inspect`: a module for each kind of thing to show: dataset, run, checkpoint."""
