"""The spans of all ranks on a common clock: where each step's time went, and the waits between ranks. Torch-free."""
