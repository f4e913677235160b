"""Recipes of corpora, on small files made by hand."""
