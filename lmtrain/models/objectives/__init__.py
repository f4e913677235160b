"""Losses returned as sums, so that division by a global count is exact."""
