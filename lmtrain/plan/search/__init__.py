"""The space of layouts and the search for the fastest."""
