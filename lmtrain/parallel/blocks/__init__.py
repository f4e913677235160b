"""What is done to each block: recomputed, compiled, dropped out, masked."""
