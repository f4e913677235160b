"""Drawn runs in stages do what docs/explanation/stages.md says; `python -m tests.stages` draws hundreds."""

from __future__ import annotations

import pytest

from tests.stages.trial import draw_runs


@pytest.mark.wide
@pytest.mark.parametrize("number", range(8))
def test_a_drawn_run_is_that_of_its_model(number: int) -> None:
    [trial] = draw_runs("wide", [number])
    assert not trial.faults, str(trial)
