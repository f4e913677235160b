"""Mistakes planted in copies of the product, one at a time, to measure which of them the tests notice."""
