"""Cleaning, deduplication, decontamination, shuffling and sampling of corpora."""
