"""The transformations of a block: recompute, compilation and dropout."""
