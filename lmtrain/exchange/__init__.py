"""Other programs' formats, read and written; only the command line needs it."""
