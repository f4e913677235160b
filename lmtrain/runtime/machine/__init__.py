"""The machine: devices, GPUs, its share of a Slurm job."""
