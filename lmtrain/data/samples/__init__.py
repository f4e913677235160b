"""Training samples made from documents: causal, packed, masked, blended."""
