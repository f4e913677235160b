"""Fused GPU operations as functions on tensors, each with a twin in torch (`..._in_torch`) that defines its result."""
