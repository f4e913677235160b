"""The test of a promise: nothing is accepted and then ignored."""
