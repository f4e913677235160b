"""Checkpoints that Megatron-LM reads and writes."""
