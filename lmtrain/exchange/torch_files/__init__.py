"""Files of torch.save, read as data and written without running anything."""
