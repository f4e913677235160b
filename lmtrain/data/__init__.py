"""Token datasets: the file format, sample indexes, order, batches and the loader."""
