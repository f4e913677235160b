"""The files of a run folder, one reader and one writer for each; and the names of the numbers in its rows."""
