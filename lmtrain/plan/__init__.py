"""Predictions of a run's memory and step time before any GPU is used. Torch-free."""
