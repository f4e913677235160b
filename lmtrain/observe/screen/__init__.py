"""The lines and the panel of a run in the terminal."""
