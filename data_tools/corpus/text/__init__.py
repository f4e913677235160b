"""Clean text, and how good it is."""
