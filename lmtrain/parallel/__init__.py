"""The distribution of a model over processes, precisions and compilers."""
