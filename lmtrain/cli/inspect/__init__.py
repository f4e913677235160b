"""`lmtrain inspect`: a view for each kind of thing that can be looked at."""
