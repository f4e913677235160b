"""Corpora that can be built without a download."""
