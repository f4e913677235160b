"""Runs in stages, drawn at random, beside a plain model of them that docs/explanation/stages.md alone describes."""
