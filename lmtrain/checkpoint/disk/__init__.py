"""The bytes of a checkpoint: manifest, hashed blocks, tensor files and the boxes they cover."""
