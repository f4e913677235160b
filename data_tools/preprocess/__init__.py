"""Preprocessing: text to token ids in .bin/.idx, in parallel."""
