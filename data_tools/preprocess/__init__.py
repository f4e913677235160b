"""Text to token ids in .bin/.idx, by several processes."""
