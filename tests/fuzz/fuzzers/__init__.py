"""One file for each kind of input; every class `Fuzz` here is found and run."""
