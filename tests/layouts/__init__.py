"""Proofs that every layout computes what one process computes, over gloo on one machine."""
