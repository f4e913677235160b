"""How a model is spread over processes, precisions and compilers."""
