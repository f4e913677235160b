"""What surrounds a run: processes, devices, seeds, signals and files."""
