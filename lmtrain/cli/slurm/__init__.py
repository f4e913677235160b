"""`lmtrain slurm`: sbatch files, written and submitted."""
