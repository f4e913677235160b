"""Corpora by name: how each is fetched and read, and a corpus that is present on every machine."""
