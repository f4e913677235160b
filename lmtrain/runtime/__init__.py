"""The surroundings of a run: processes, devices, seeds, signals, files, text for terminals, the compiled helpers."""
