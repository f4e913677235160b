"""A package of somebody else: one file, its settings and a config for each thing that --plugin can add."""
