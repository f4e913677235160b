"""`lmtrain config`: which settings there are and where their values come from."""
