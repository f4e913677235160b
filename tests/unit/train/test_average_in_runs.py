"""A run updates, measures, saves and resumes the average of its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.checkpoint.view_with_ema_as_weights import WeightSet
from lmtrain.checkpoint.weight_ema_settings import WeightAverageSettings
from lmtrain.parallel.parallel_model import ParallelModel
from lmtrain.runtime.processes.stop_signals import StopRequest
from lmtrain.train import loop
from lmtrain.train.in_loop import validate_and_evaluate
from lmtrain.train.in_loop.save_and_stop_requests import MeasurementCutOff
from lmtrain.train.run_objects_and_resume import Run
from tests.unit.train.tiny_runs import opened

pytestmark = pytest.mark.wide
EMA = WeightAverageSettings(decay=0.75)
SAVING: dict[str, Any] = {"interval_steps": 1, "keep_last": 9, "ema": EMA}


def train(run: Run, stop_after: int = 99) -> None:
    stop = StopRequest()
    finish_step = run.durations.end_step

    def end_step(waited_s: float) -> None:
        finish_step(waited_s)
        if run.progress.step == stop_after:
            stop.requested = "SIGTERM"

    run.durations.end_step = end_step  # type: ignore[method-assign]
    loop.train(run, stop)


def reader(folder: Path, step: int, weights: WeightSet = "model") -> CheckpointReader:
    return CheckpointReader(folder / "checkpoints" / f"step_{step:08d}", weights)


def saved(folder: Path, step: int, prefix: str) -> dict[str, Any]:
    checkpoint = reader(folder, step)
    names = [name for name in checkpoint.manifest.tensors if name.startswith(f"{prefix}.")]
    return {name.removeprefix(f"{prefix}."): checkpoint.read(name).numpy() for name in names}


def rows(folder: Path, event: str) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if row["event"] == event]


def test_each_checkpoint_has_the_average_of_the_weights_of_all_steps_up_to_it(tmp_path: Path) -> None:
    with opened(tmp_path, **SAVING) as run:
        average: dict[str, Any] = {name: p.detach().numpy().copy() for name, p in run.model.parameters.items()}
        train(run)
    for step in range(1, 7):
        weights, share = saved(tmp_path, step, "model"), np.float64(0.25)
        for name, padded in average.items():
            old = padded[: len(weights[name])]  # checkpoints hold no padding of the vocabulary
            average[name] = (share * np.float64(weights[name] - old) + np.float64(old)).astype(np.float32)
        np.testing.assert_equal(saved(tmp_path, step, "ema"), average)
    assert reader(tmp_path, 6).state["ema"] == {"decay": 0.75, "every_steps": 1, "from_step": 0, "since_step": 0}


def test_a_run_that_was_stopped_goes_on_with_the_same_average(tmp_path: Path) -> None:
    for folder, stops in (("whole", (99,)), ("stopped", (2, 4, 99))):
        for stop_after in stops:
            with opened(tmp_path / folder, **SAVING | {"ema": replace(EMA, every_steps=2)}) as run:
                train(run, stop_after)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for prefix in ("model", "ema", "optim"):
        np.testing.assert_equal(saved(stopped, 6, prefix), saved(whole, 6, prefix))
    assert reader(stopped, 6).state["ema"] == reader(whole, 6).state["ema"]
    assert rows(stopped, "valid")[-1]["ema"] == rows(whole, "valid")[-1]["ema"]


def test_a_validation_measures_the_average_and_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "with", **SAVING) as run:
        train(run)
    with opened(tmp_path / "without", **SAVING | {"ema": WeightAverageSettings()}) as run:
        train(run)
    for step, prefix in ((5, "model"), (6, "model"), (6, "optim")):
        np.testing.assert_equal(saved(tmp_path / "with", step, prefix), saved(tmp_path / "without", step, prefix))
    without, with_average = (rows(tmp_path / name, "valid") for name in ("without", "with"))
    assert [row["loss"] for row in without] == [row["loss"] for row in with_average]
    assert "ema" not in without[0]
    assert not saved(tmp_path / "without", 6, "ema")
    assert "ema" not in reader(tmp_path / "without", 6).state
    with opened(tmp_path / "again", interval_steps=1) as run:  # a run whose weights are the average
        run.model.load(reader(tmp_path / "with", 5, "ema").load_into)
        run.progress.step = 5
        loss = validate_and_evaluate.validate(run, _NeverStops())  # type: ignore[arg-type]
    assert loss == with_average[0]["ema"]["loss"] != with_average[0]["loss"]


def test_evaluations_score_the_average_beside_the_weights(tmp_path: Path) -> None:
    def evaluation(model: ParallelModel, before_each: Any, show_activity: Any) -> Iterator[dict[str, Any]]:
        for name, weight in list(model.parameters.items())[:2]:
            before_each()
            measures = {"sum": float(weight.detach().double().sum())}
            yield {"name": name, "measures": measures, "headline": "sum", "seconds": 1.0}

    with opened(tmp_path, **SAVING) as run:
        loop.train(run, StopRequest(), evaluation)
        of_weights, of_average = run.model.parameters, run.average.tensors
        for row in rows(tmp_path, "eval"):
            assert row["measures"] == {"sum": float(of_weights[row["name"]].detach().double().sum())}
            assert row["ema"] == {"sum": float(of_average[row["name"]].double().sum())} != row["measures"]
            assert row["seconds"] == 2.0
    assert len(rows(tmp_path, "eval")) == 2


class _NeverStops:
    def batches_until_stop(self, batches: Any) -> Any:
        return batches


def test_a_stop_in_the_middle_of_a_measurement_saves_the_weights_and_their_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "whole", **SAVING) as run:
        train(run)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000006")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000005")
    measured = validate_and_evaluate._measure_validation

    def cut_off(run: Run, requests: Any, suffix: str = "") -> dict[str, Any]:
        if suffix:
            raise MeasurementCutOff
        return measured(run, requests, suffix)

    monkeypatch.setattr(validate_and_evaluate, "_measure_validation", cut_off)
    with opened(tmp_path / "cut", **SAVING) as run:
        train(run, stop_after=5)
    assert reader(tmp_path / "cut", 5).state["owed"] == ["validation"]
    for prefix in ("model", "ema"):
        np.testing.assert_equal(saved(tmp_path / "cut", 5, prefix), saved(tmp_path / "whole", 5, prefix))


@pytest.mark.parametrize(
    ("before", "after", "said", "since_step"),
    [
        (WeightAverageSettings(), EMA, "has no average of the weights; that of checkpoint.ema.decay=0.75 begins", 3),
        (WeightAverageSettings(), replace(EMA, from_step=4), None, 4),
        (EMA, WeightAverageSettings(), "(decay 0.75, since step 0) is left out, since checkpoint.ema.decay=null", None),
        (EMA, replace(EMA, from_step=4), "is left out, since checkpoint.ema.from_step=4 begins a new one later", 4),
        (EMA, replace(EMA, decay=0.5, from_step=2), None, 0),
    ],
)
def test_an_average_begins_or_ends_aloud(
    tmp_path: Path, before: WeightAverageSettings, after: WeightAverageSettings, said: str | None,
    since_step: int | None,
) -> None:  # fmt: skip
    with opened(tmp_path, **SAVING | {"ema": before}) as run:
        train(run, stop_after=3)
    with opened(tmp_path, **SAVING | {"ema": after}) as run:
        train(run)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    found = [line for line in lines if "warning" in line and "average of the weights" in line]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    state = reader(tmp_path, 6).state.get("ema")
    assert (state and state["since_step"]) == since_step
    assert bool(saved(tmp_path, 6, "ema")) == after.is_on
