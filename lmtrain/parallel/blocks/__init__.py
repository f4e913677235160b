"""The transformations of a block: recompute, compile, dropout noise, masks."""
