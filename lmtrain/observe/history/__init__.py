"""The recorded metrics of a run, read back for pages, tables and comparisons; the run may still go on or be damaged."""
