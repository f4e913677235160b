"""Sinks that copy a run's record to TensorBoard and Weights & Biases."""
