"""Fused GPU operations as functions on tensors, each with a fallback (`..._twin`) in torch that defines its result."""
