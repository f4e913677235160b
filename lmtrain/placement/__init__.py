"""The placement of layers, parameters and bytes on the ranks of a layout, and the batches it allows. Torch-free."""
