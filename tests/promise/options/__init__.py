"""The test of the same promise for the command line: no option is taken and then ignored."""
