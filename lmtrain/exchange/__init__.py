"""Other programs' formats, read and written; only the command line and the Python interface need it."""
