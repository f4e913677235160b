"""What a person can type or put into a file by mistake, and what is said about it."""
