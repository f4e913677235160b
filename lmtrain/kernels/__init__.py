"""Fused work for GPUs as plain functions on tensors, each with a twin in torch that says what it means."""
