"""A run that is started again: what is said of other settings and of steps that are lost, and what its record keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lmtrain.runfolder.metrics_rows import read_metrics
from tests.cli.harness import Toy, lmtrain


@pytest.mark.wide
def test_a_finished_run_keeps_what_it_trained_with_and_one_that_goes_on_says_what_is_new(
    toy: Toy, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    lmtrain("pretrain", *toy.settings(folder, train__steps=4))
    trained = (folder / "config.json").read_bytes()
    said = lmtrain("pretrain", *toy.settings(folder, train__steps=4, optim__lr="5e-4"))
    assert "nothing is left to do" in said
    assert "the run is finished, so its settings stay as they were: optim.lr=0.003" in said
    assert (folder / "config.json").read_bytes() == trained
    assert "from here on" not in lmtrain("pretrain", *toy.settings(folder, train__steps=4))

    older = json.loads(trained)
    del older["checkpoint"]["fallback"]  # as an older version had no such setting
    (folder / "config.json").write_text(json.dumps(older))
    words = toy.settings(folder, train__steps=16, optim__betas="[0.9,0.99]")
    assert "optim.betas=[0.9,0.99], was [0.9,0.95]; train.steps=16, was 4" in lmtrain("pretrain", *words, "--dry-run")
    said = lmtrain("pretrain", *words)
    assert "checkpoint.fallback" not in said
    for text in (
        "train.steps is 16 from here on; it was 4",
        "optim.betas is [0.9,0.99] from here on; it was [0.9,0.95]",
    ):
        assert text in said
        assert text in (folder / "log.txt").read_text()
    assert "warning: with that the learning rate goes from 1.65e-03 to 2." in said
    assert "schedule=constant optim.lr=1.65e-03 keeps the rate" in said
    assert (folder / "config.json").read_bytes() != trained

    said = lmtrain("inspect", folder)
    assert "train.steps: 4 from step 1, 16 from step 5" in said
    assert "optim.betas: [0.9,0.95] from step 1, [0.9,0.99] from step 5" in said
    lmtrain("report", folder)
    page = (folder / "report.html").read_text()
    assert "that changed while it trained" in page
    assert page.count("optim.betas</td>") == 3
    said = lmtrain("config", "explain", "train.steps", "--run", folder)
    assert re.search(r"held +4, from step 1 *\n +16, from step 5 *\n", said)
    values = json.loads(lmtrain("config", "explain", "optim", "--run", folder, "--json"))
    assert [(row["step"], row["value"]) for row in values if row["key"] == "optim.betas"] == [
        (1, [0.9, 0.95]), (5, [0.9, 0.99])
    ]  # fmt: skip
    assert "Leave optim.lr=1 out" in lmtrain("config", "explain", "optim", "optim.lr=1", "--run", folder, code=2)


@pytest.mark.wide
def test_a_branch_says_what_is_new_and_where_its_learning_rate_begins(toy: Toy, tmp_path: Path) -> None:
    lmtrain("pretrain", *toy.settings(tmp_path / "run", train__steps=4))
    words = "--from-run", tmp_path / "run", "schedule=linear", "optim.lr=1e-3", "train.steps=10"
    said = lmtrain("pretrain", *words, f"run.dir={tmp_path / 'branch'}")
    for line in ("optim.lr is 0.001 from here on; it was 0.003", "schedule.kind is linear from here on; it was cosine"):
        assert line in said
    assert re.search(r"the learning rate goes from \S+ to 6\.67e-04 in one step, because the schedule counts", said)
    advised = re.findall(r"stages\.\S+", said)
    assert advised == ["stages.next.steps=6", "stages.next.schedule=linear"]
    staged = lmtrain("pretrain", *words[:2], "stages.next.optim.lr=1e-3", *advised, f"run.dir={tmp_path / 'staged'}")
    assert "warning" not in staged
    assert "stages." not in staged.partition("continuing from")[2]
    first = next(row for row in read_metrics(tmp_path / "staged" / "metrics.jsonl") if row["event"] == "step")
    assert (first["step"], first["lr"]) == (5, 1e-3)
    again = lmtrain("pretrain", *words, f"run.dir={tmp_path / 'branch'}")
    assert "from here on" not in again


def test_steps_of_which_nothing_was_saved_are_said_to_be_lost(toy: Toy, tmp_path: Path) -> None:
    words = toy.settings(tmp_path / "run", checkpoint__interval_steps=500)
    fault = {"LMTRAIN_FAULT": "exc:point=step:step=4", "LMTRAIN_ALLOW_FAULTS": "1"}
    assert "no checkpoint" not in lmtrain("pretrain", *words, code=1, env=fault)
    other = toy.settings(tmp_path / "run", checkpoint__interval_steps=500, model__num_layers=1)
    said = lmtrain("pretrain", *other)
    assert "warning: the 4 steps before have left no checkpoint; the run begins at step 1 again" in said
    assert "model.num_layers is 1 from here on; it was 2" in said
