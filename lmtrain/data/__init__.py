"""Token datasets: file format, sample indexes, sample order, batches and the loader."""
