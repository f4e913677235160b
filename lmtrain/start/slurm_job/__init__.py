"""The sbatch file of a run or an array of runs: its options, checked, its text, and its submission."""
