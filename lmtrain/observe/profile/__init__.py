"""Tables of kernels by class, made from torch's trace of a few steps."""
