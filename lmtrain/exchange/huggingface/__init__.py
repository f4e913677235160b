"""Folders that Hugging Face's transformers reads and writes."""
