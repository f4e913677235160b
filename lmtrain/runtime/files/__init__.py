"""Files: read, written and hashed with care, within limits."""
