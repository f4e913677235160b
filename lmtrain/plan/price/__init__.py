"""Seconds and joules of products, messages and steps on a machine."""
