"""What a run has recorded, read back for pages, tables and comparisons: also of a run that goes on, or was damaged."""
