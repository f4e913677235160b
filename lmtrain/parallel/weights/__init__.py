"""Weights over ranks: shards, precision, tied copies, gradients."""
