"""How sure a score is: resamples, paired tests, baselines."""
