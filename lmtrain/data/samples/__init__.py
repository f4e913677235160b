"""Training samples out of documents: causal, packed, masked, blended."""
