"""Texts to score, and the windows of tokens into which they are cut."""
