"""Documents as a stream: read, sorted, counted, written."""
