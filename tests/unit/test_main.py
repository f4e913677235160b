"""Which command lines are runs, whose signals are noted before anything is imported."""

from __future__ import annotations

import pytest

from lmtrain.__main__ import is_run


@pytest.mark.parametrize("words", [["pretrain"], ["pretrain", "--help"], ["--debug", "pretrain", "model=gpt_tiny"]])
def test_a_run(words: list[str]) -> None:
    assert is_run(words)


@pytest.mark.parametrize("words", [[], ["--help"], ["inspect", "pretrain"], ["slurm", "render", "pretrain"]])
def test_no_run(words: list[str]) -> None:
    """Ctrl-C would be noted, and nobody would look."""
    assert not is_run(words)
