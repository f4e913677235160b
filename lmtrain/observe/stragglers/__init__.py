"""Which process or link is slower than those that do the same."""
