"""The start of a run or an evaluation, between the commands and the rooms that do the work; it prints nothing."""
