"""What every process did when, in a small file of each: written while a run trains, read afterwards or meanwhile."""
