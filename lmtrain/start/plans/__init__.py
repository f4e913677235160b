"""What a planner is asked for, its answer, and the fit of a machine to runs; torch-free."""
