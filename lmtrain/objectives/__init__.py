"""Losses that return sums, so that division by a global count is exact."""
