"""Checks before a run's first step: machine, data, checkpoint, first weights."""
