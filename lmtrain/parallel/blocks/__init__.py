"""The transformations of a block: recompute, compile, dropout dropout_seeds, masks."""
