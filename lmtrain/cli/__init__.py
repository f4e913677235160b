"""The command line: the only room that may know two apps at once."""
