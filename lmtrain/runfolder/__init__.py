"""The files of a run folder: one reader and one writer for each file."""
