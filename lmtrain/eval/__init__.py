"""Evaluation: scoring, tasks, statistics, baselines and generation."""
