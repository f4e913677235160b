"""Measurements of a running process: throughput and memory."""
