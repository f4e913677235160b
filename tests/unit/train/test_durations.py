"""Durations: those of this attempt come before those of earlier attempts, and the longest counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmtrain.train.step_and_save_durations import EVALUATION, VALIDATION, Durations, young_daly_s


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


def test_the_first_step_counts_only_until_there_is_another() -> None:
    clock = Clock()
    costs = Durations(clock=clock)
    assert costs.step_s == 0.0
    for seconds, waited, expected in ((60.0, 0.0, 60.0), (2.0, 0.5, 2.5), (1.0, 0.0, 2.5)):
        costs.begin_step()
        clock.now += seconds
        costs.end_step(waited)
        assert costs.step_s == expected


def test_what_is_not_measured_to_its_end_does_not_count() -> None:
    clock = Clock()
    costs = Durations(clock=clock)
    for seconds, counts in ((3.0, True), (9.0, False)):
        with costs.measuring(VALIDATION) as measured:
            clock.now += seconds
            measured.counts = counts
    assert costs.longest(VALIDATION) == 3.0


def test_a_run_that_has_not_saved_reckons_with_a_slow_disk() -> None:
    costs = Durations(num_parameters=1_000_000_000)
    assert costs.save_s == 120.0
    assert costs.stall_s is None
    costs.add_save(write_s=3.0, stall_s=0.5)
    assert costs.save_s == 3.5
    assert costs.longest("stall") == 0.5


ROWS: list[dict[str, Any]] = [
    {"event": "step", "attempt": 1, "step": 10, "elapsed_s": 20.0},
    {"event": "step", "attempt": 1, "step": 20, "elapsed_s": 50.0},
    {"event": "save", "attempt": 1, "step": 20, "saved_step": 20, "write_s": 4.0, "stall_s": 1.0},
    {"event": "valid", "attempt": 1, "step": 20, "loss": 3.0, "seconds": 7.0},
    {"event": "valid", "attempt": 1, "step": 25, "loss": 3.0},  # of an older version
    {"event": "eval", "attempt": 1, "step": 20, "name": "a", "seconds": 2.0},
    {"event": "eval", "attempt": 1, "step": 20, "name": "b", "seconds": 3.0},
    {"event": "step", "attempt": 2, "step": 30, "elapsed_s": 1.0},
    {"event": "step", "attempt": 2, "step": 40, "elapsed_s": "nan"},
]


def test_earlier_attempts_tell_until_this_one_knows_better(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in ROWS]
    (tmp_path / "metrics.jsonl").write_text("\n".join(["torn", *lines, "[1]", '{"event": "ste']))
    costs = Durations()
    costs.load_earlier(tmp_path)
    assert (costs.step_s, costs.save_s, costs.stall_s) == (3.0, 5.0, 1.0)
    assert (costs.longest(VALIDATION), costs.longest(EVALUATION)) == (7.0, 5.0)
    costs.add_save(write_s=2.0, stall_s=0.0)
    assert costs.save_s == 2.0


def test_a_new_run_knows_nothing(tmp_path: Path) -> None:
    costs = Durations()
    costs.load_earlier(tmp_path)
    assert (costs.step_s, costs.save_s, costs.stall_s) == (0.0, 0.0, None)


def test_young_and_daly() -> None:
    assert young_daly_s(save_s=2.0, between_failures_s=3600.0) == pytest.approx(120.0)
