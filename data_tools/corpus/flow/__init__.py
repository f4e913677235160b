"""Streams of documents: reading, sorting, counting, writing."""
