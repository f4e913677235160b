"""Measurements of a running process: phases, throughput, memory, distributions."""
