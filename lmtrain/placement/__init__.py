"""The placement of layers, parameters and bytes on the ranks of a layout. Torch-free."""
