"""`lmtrain runs` and `lmtrain watch`: list, compare, plot and follow runs."""
