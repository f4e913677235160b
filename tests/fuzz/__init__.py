"""Damaged and hostile files through the verbs that open them: `python -m tests.fuzz --seconds 60`."""
