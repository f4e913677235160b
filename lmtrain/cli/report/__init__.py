"""`lmtrain report`: the page of a run, section by section."""
