"""`lmtrain plan --calibrate`: runs that were measured make a machine that can be chosen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lmtrain.plan import calibrate_to_measured_steps
from lmtrain.plan.calibrate_to_measured_steps import Calibration, MeasuredRun
from lmtrain.plan.cost_model.hardware_figures import Hardware
from tests.cli.harness import Toy, lmtrain


@pytest.mark.wide
def test_runs_make_a_machine_that_can_be_chosen(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[MeasuredRun] = []
    fit = calibrate_to_measured_steps.calibrate

    def seen(machine: Hardware, runs: Sequence[MeasuredRun]) -> Calibration:
        measured.extend(runs)
        return fit(machine, runs)

    monkeypatch.setattr(calibrate_to_measured_steps, "calibrate", seen)
    runs = [tmp_path / f"width_{width}" for width in (16, 32, 64)]
    for width, run in zip((16, 32, 64), runs, strict=True):
        lmtrain("pretrain", *toy.settings(run, model__width=width), "checkpoint.interval_steps=null")
    file = tmp_path / "mine" / "hardware" / "desk.yaml"
    output = lmtrain("plan", "--calibrate", *runs, "hardware=cpu", "--out", file)
    assert "where each run is judged by a fit to the others alone" in output
    assert f"--config-dir {tmp_path / 'mine'} hardware=desk" in output
    facts = json.loads(lmtrain("plan", "--calibrate", *runs, "hardware=cpu", "--json"))
    assert [row["run"] for row in facts["runs"]] == [str(run) for run in runs]
    assert all(one.run.on_cpu and not one.run.compiles for one in measured)  # whatever compute.device says
    chosen = ["hardware=desk", "--config-dir", tmp_path / "mine"]
    plan = json.loads(lmtrain("pretrain", *toy.settings(tmp_path / "next"), *chosen, "--dry-run", "--json"))
    assert plan["hardware"] == "desk"
    # a run may name the machine, and what was learnt is the place to begin
    lmtrain("pretrain", "--from-run", runs[0], f"run.dir={tmp_path / 'again'}", "checkpoint.resume=none", *chosen)
    facts = json.loads(lmtrain("plan", "--calibrate", tmp_path / "again", runs[1], "--json"))
    assert facts["hardware"] == "desk"


def test_what_tells_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    one = lmtrain("plan", "--calibrate", tmp_path / "run", "hardware=cpu", code=2)
    assert "--calibrate needs two or more runs" in one
    two = lmtrain("plan", "--calibrate", tmp_path / "run", tmp_path / "other", code=66)
    assert f"{tmp_path / 'run'} is not the folder of a run: it has no config.json." in two
    place = lmtrain("plan", "--calibrate", tmp_path, "--out", tmp_path / "desk.yaml", code=2)
    assert f"--output={tmp_path / 'hardware' / 'desk.yaml'}" in place
    assert "Give --calibrate" in lmtrain("plan", "gpus=8", "--out", "x.yaml", code=2)


@cache
def _config() -> str:
    return lmtrain("pretrain", "model=gpt_tiny", "data.path=x", "model.vocab_size=400", "--print-config", "--json")


def _run(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(_config(), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def _rows(**damage: Any) -> list[dict[str, Any]]:
    """Return sound rows, the last one with the values of `damage` in it, or without a field whose value is None."""
    rows = [{"event": "step", "step": step, "attempt": 1, "elapsed_s": 0.1 * step} for step in range(1, 16)]
    return [*rows[:-1], {key: value for key, value in (rows[-1] | damage).items() if value is not None}]


def _rows_between_others() -> list[dict[str, Any]]:
    """Steps of 0.1 s, and behind every second one a validation or a save that takes a second."""
    rows = []
    for step in range(1, 20):
        elapsed_s = 0.1 * step + step // 2
        rows.append({"event": "step", "step": step, "attempt": 1, "elapsed_s": elapsed_s - (step % 2 == 0)})
        if step % 2 == 0:
            event = "save" if step % 4 else "valid"
            rows.append({"event": event, "step": step, "attempt": 1, "elapsed_s": elapsed_s})
    return rows


@pytest.mark.parametrize("damage", [{"elapsed_s": 0.1}, {"elapsed_s": "x"}, {"elapsed_s": None}, {"attempt": None}])
def test_rows_without_a_time_are_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    runs = _run(tmp_path / "good", _rows()), _run(tmp_path / "bad", _rows(**damage))
    said = lmtrain("plan", "--calibrate", *runs, "hardware=cpu", code=65)
    assert f"{tmp_path / 'bad' / 'metrics.jsonl'} is damaged or was not written by lmtrain: the time of a row" in said


@pytest.mark.parametrize(
    ("rows", "words", "code", "said"),
    [
        (_rows()[:7], ["hardware=cpu"], 65, "has recorded 1 step times with the full batch after its first 5 steps"),
        ([row | {"stage": "a"} for row in _rows()], ["hardware=cpu"], 65, "has recorded 0 step times"),
        (_rows(), ["hardware=cpu", "hardware=h100"], 2, "hardware=h100 cannot be given to --calibrate"),
        (_rows(), ["hardware.power_W=9"], 2, "hardware is not given; a plan needs a machine."),
        (_rows(), [], 2, "--calibrate fits one machine, but the machines in the settings of the runs are: none."),
    ],
)
def test_runs_and_words_that_make_no_machine(
    tmp_path: Path, rows: list[dict[str, Any]], words: list[str], code: int, said: str
) -> None:
    runs = _run(tmp_path / "good", _rows()), _run(tmp_path / "bad", rows)
    assert said in lmtrain("plan", "--calibrate", *runs, *words, code=code)


def test_what_is_done_between_steps_is_no_time_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        calibrate_to_measured_steps, "calibrate", lambda machine, runs: Calibration(machine, [0.0, 0.0], [0.0, 0.0])
    )
    runs = _run(tmp_path / "plain", _rows()), _run(tmp_path / "validates", _rows_between_others())
    facts = json.loads(lmtrain("plan", "--calibrate", *runs, "hardware=cpu", "--json"))
    assert [row["measured_step_s"] for row in facts["runs"]] == pytest.approx([0.1, 0.1])


def test_a_run_says_nothing_of_itself(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _rows())
    said = lmtrain("plan", "--calibrate", run, tmp_path / "other" / ".." / "run", "hardware=cpu", code=2)
    assert "twice" in said
    assert "Give every run once" in said
