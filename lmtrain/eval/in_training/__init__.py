"""Evaluations of a run on its way."""
