"""The evaluation app: scoring, tasks, baselines and generation."""
