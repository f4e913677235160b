"""Checkpoints: safetensors and JSON, layout-free, verified block by block."""
