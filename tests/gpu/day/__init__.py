"""A day on a GPU in 25 minutes: everything that only a GPU can tell, in parts, from a machine that has torch alone."""
