"""Documents that are copies of others, or of what is evaluated."""
