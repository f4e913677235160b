"""Corpora by name: how each is fetched and read, and one that every machine has already."""
