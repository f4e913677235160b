"""Tokenizers: loading, training and the fingerprint that datasets and checkpoints carry."""
