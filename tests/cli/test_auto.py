"""`parallel=auto`: the planner chooses once and says why, and the run keeps it through resumes and new starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain, start

AUTO = ("parallel=auto", "hardware=cpu")


def layout(folder: Path) -> tuple[Any, ...]:
    config = json.loads((folder / "config.json").read_text())
    assert config["parallel"]["auto"] is False
    assert config["hardware"]["name"] == "cpu"
    return config["parallel"], config["train"]["micro_batch"], config["recompute"]


def settled(*words: object) -> dict[str, Any]:
    output = lmtrain("pretrain", *words, "--print-config", "--json")
    found: dict[str, Any] = json.loads(output[output.index("{\n") :])
    return found


def test_what_was_chosen_is_told_and_what_is_given_is_kept(toy: Toy, tmp_path: Path) -> None:
    words = [*toy.settings(tmp_path / "run"), *AUTO]
    output = lmtrain("pretrain", *words, "parallel.pp=1", "recompute=none", "--dry-run", "--nproc", 2)
    assert output.startswith("parallel=auto: ")
    assert "for 2 of cpu: a step of " in output
    config = settled(*words, "parallel.tp=2", "train.micro_batch=1", "recompute=full", "--nproc", 2)
    assert config["parallel"]["tp"] == 2
    assert config["train"]["micro_batch"] == 1
    assert config["recompute"]["kind"] == "full"
    assert config["parallel"]["auto"] is False


def test_what_cannot_be_chosen_is_refused_with_a_way_out(toy: Toy, tmp_path: Path) -> None:
    words = toy.settings(tmp_path / "run")
    assert "Add hardware=h100" in lmtrain("pretrain", *words, "parallel=auto", "--dry-run", code=2)
    output = lmtrain("pretrain", *words, *AUTO, "--nproc", 3, "--dry-run", code=78)
    assert "finds no layout of 3 processes" in output
    assert "Start 1, 2 or 4 processes." in output
    output = lmtrain("pretrain", *words, *AUTO, "--nproc", 2, "parallel.tp=4", "--dry-run", code=78)
    assert "with parallel.tp=4" in output
    small = lmtrain("pretrain", *words, *AUTO, "hardware.memory_GiB=0.0001", "--dry-run", code=78)
    assert "that fits in 104.9 KiB of hardware=cpu" in small
    slurm = lmtrain("slurm", "render", *words, *AUTO, "--tasks-per-node", 2, code=78)
    assert "parallel.auto=true" in slurm


@pytest.mark.wide
def test_a_run_keeps_its_layout(toy: Toy, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["--nproc", 2, *toy.settings(folder), *AUTO, "parallel.tp=2"]
    process = start("pretrain", *words, "train.steps=6")
    output = process.communicate(timeout=900)[0]
    assert process.returncode == 0, output
    assert output.count("parallel=auto: ") == 1
    began = layout(folder)
    # another command, under which the planner would choose otherwise, goes on as the run began
    process = start("pretrain", "--nproc", 2, *toy.settings(folder), *AUTO)
    output = process.communicate(timeout=900)[0]
    assert process.returncode == 0, output
    assert "parallel=auto: tp 2, as chosen when the run began" in output
    assert layout(folder) == began
    assert settled("--from-run", folder)["parallel"] == began[0]
    assert settled("--from-run", folder, f"run.dir={tmp_path / 'branch'}")["parallel"] == began[0]


@pytest.mark.wide
def test_another_number_of_processes_goes_on_with_elastic(toy: Toy, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*toy.settings(folder), *AUTO]
    process = start("pretrain", "--nproc", 2, *words, "train.steps=6")
    output = process.communicate(timeout=900)[0]
    assert process.returncode == 0, output
    assert "processes" in lmtrain("pretrain", *words, code=78)
    output = lmtrain("pretrain", *words, "--elastic")
    assert "as chosen when the run began" in output
    assert "--elastic: 1 process shares the work of 2" in output
    steps = [row["step"] for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]
    assert steps == list(range(1, 13))


@pytest.mark.wide
def test_a_sweep_chooses_for_each_run_once(toy: Toy, tmp_path: Path) -> None:
    words = ["-m", *toy.settings(tmp_path / "runs", train__steps="4,6"), *AUTO]
    process = start("pretrain", *words)
    output = process.communicate(timeout=900)[0]
    assert process.returncode == 0, output
    assert output.count("parallel=auto: ") == 2
    process = start("pretrain", *words)
    output = process.communicate(timeout=900)[0]
    assert output.count("which is done") == 2


@pytest.mark.wide
def test_a_run_says_how_far_off_the_planner_was(toy: Toy, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rampup = "train.rampup={start: 2, increment: 2, samples: 30}"
    output = lmtrain("pretrain", *toy.settings(folder, train__steps=24), "hardware=cpu", rampup)
    [row] = [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "forecast"]
    assert row["step"] == 20
    assert row["low_s"] < row["predicted_step_s"] < row["high_s"]
    assert row["measured_step_s"] > 0
    assert row["said"] in output
    assert row["said"] in (folder / "log.txt").read_text()
