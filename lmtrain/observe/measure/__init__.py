"""What is measured of a run: phases, throughput, memory, distributions."""
