"""Runs that are broken on purpose, by the hundred: what is measured and recorded, where tests hold one short case."""
