"""Prediction of seconds and joules for matrix products, messages and steps on a machine."""
