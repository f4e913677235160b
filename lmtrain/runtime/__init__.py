"""The surroundings of a run: processes, devices, seeds, signals and files."""
