"""`lmtrain runs` and `lmtrain watch`: what lies in the folders of runs."""
