"""Scores of texts: batches, passes over them, and results of a part."""
