"""A run saves checkpoints by time and by steps, and keeps those with the best scores."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.runtime.processes.stop_signals import StopRequest
from lmtrain.train import loop
from lmtrain.train.in_loop.save_and_stop_requests import open_requests
from lmtrain.train.run_objects_and_resume import Run
from tests.layouts.cases import VOCAB
from tests.unit.train import tiny_runs
from tests.unit.train.tiny_runs import CONFIG, opened


def kept(folder: Path) -> list[int]:
    return sorted(int(name.removeprefix("step_")) for name in os.listdir(folder / "checkpoints"))


def train(run: Run, patch: pytest.MonkeyPatch, *, step_s: float = 0.0, stop_after: int | None = None) -> None:
    """Train by a clock on which every step takes `step_s`; a signal comes in step `stop_after`."""
    stop = StopRequest()

    def clock() -> float:
        if run.progress.step == stop_after:
            stop.requested = "SIGTERM"
        return run.progress.step * step_s

    patch.setattr(loop, "open_requests", partial(open_requests, clock=clock))
    loop.train(run, stop)


def test_the_clock_of_saves_begins_anew_with_each_save_whatever_it_was_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, interval_steps=2, interval_s=500.0, keep_last=9) as run:
        train(run, monkeypatch, step_s=200.0)
    assert kept(tmp_path) == [2, 4, 6], "600 s after the start, but 200 s after a save, none is due by the clock"


@pytest.mark.parametrize(("settings", "saved"), [({}, [3, 6]), ({"interval_steps": None}, [])])
def test_a_slow_run_saves_by_time_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], saved: list[int]
) -> None:
    with opened(tmp_path, **settings) as run:
        train(run, monkeypatch, step_s=200.0)
    assert (kept(tmp_path) if saved else list(tmp_path.glob("checkpoints/*"))) == saved


def test_a_run_that_goes_on_keeps_the_best_of_its_earlier_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"interval_steps": 1, "keep_last": 1, "keep_best": 1}
    with opened(tmp_path, **settings) as run:
        train(run, monkeypatch, stop_after=2)
    (stopped_at,) = kept(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"event": "valid", "step": stopped_at, "loss": 0.5}) + "\n")
    with opened(tmp_path, **settings) as run:
        train(run, monkeypatch)
    assert kept(tmp_path) == [stopped_at, 6]


def test_a_validation_that_a_stop_cut_off_at_the_last_step_is_made_up_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def validated() -> list[int]:
        rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        return [row["step"] for row in rows if row["event"] == "valid"]

    for stop_after, expected in ((6, [5]), (None, [5, 6]), (None, [5, 6])):
        with opened(tmp_path) as run:
            train(run, monkeypatch, stop_after=stop_after)
        assert validated() == expected


@pytest.mark.wide
def test_a_z_loss_is_a_number_beside_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for z_loss in (0.0, 0.01):
        assert isinstance(CONFIG.model, GPTSettings)
        monkeypatch.setattr(tiny_runs, "CONFIG", replace(CONFIG, model=replace(CONFIG.model, z_loss=z_loss)))
        with opened(tmp_path / str(z_loss)) as run:
            train(run, monkeypatch)
        lines = map(json.loads, (tmp_path / str(z_loss) / "metrics.jsonl").read_text().splitlines())
        rows.append({(row["event"], row["step"]): row for row in lines})
    without, with_z = rows
    assert "z_loss" not in without["step", 1]
    assert with_z["step", 1]["z_loss"] == pytest.approx(0.01 * math.log(VOCAB) ** 2, rel=0.01)
    assert with_z["step", 1]["loss"] == without["step", 1]["loss"]
    assert with_z["step", 6]["loss"] != without["step", 6]["loss"]
    assert "z_loss" not in with_z["valid", 5]
