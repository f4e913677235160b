"""What a profile of some steps says: kernels by class, from torch's trace."""
