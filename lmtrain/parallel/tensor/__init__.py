"""Layers, embedding and head cut over tensor-parallel ranks."""
