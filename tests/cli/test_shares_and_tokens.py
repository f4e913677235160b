"""What a run trains on, and how many tokens it says it took."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST, encode_manifest
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.data.cut_datasets_into_samples import READ_SHARES
from lmtrain.data.samples.packing import Packing
from lmtrain.data.store.document_boundaries import DocumentMap
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.observe.metrics import read_metrics
from lmtrain.train.startup_checks import preflight
from tests.cli.harness import Toy, lmtrain


def steps(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]


def samples_of(toy: Toy, folder: Path, *more: str) -> int:
    plan = lmtrain("pretrain", *toy.settings(folder, train__valid_interval_steps=100), *more, "--dry-run", "--json")
    return int(json.loads(plan)["training_samples"])


def test_what_nothing_reads_is_trained_on(toy: Toy, tmp_path: Path) -> None:
    elsewhere = f"data.valid_path={toy.data}"
    everything = samples_of(toy, tmp_path, "data.split=[1]", elsewhere)
    assert samples_of(toy, tmp_path, "data.split=[50,25,25]", elsewhere) == everything
    two = samples_of(toy, tmp_path, "data.split=[60,20]")
    assert two < 0.9 * everything
    assert samples_of(toy, tmp_path, "data.split=[60,20,20]") == two


def change(checkpoint: Path, alter: Callable[[dict[str, Any]], object]) -> None:
    """Another state, as an older version would have written it."""
    manifest = Contents(checkpoint).manifest
    alter(manifest.state)
    (checkpoint / MANIFEST).write_bytes(encode_manifest(replace(manifest, digest="")))


def test_of_an_older_run_the_samples_are_shown_that_it_has_read(toy: Toy, tmp_path: Path) -> None:
    """The third share was kept from training, though nothing reads it."""
    lmtrain(
        "pretrain", *toy.settings(tmp_path / "run", data__split="[10,0,90]", train__steps=1, schedule__warmup_steps=0)
    )
    shown = ("data", "show", "--run", tmp_path / "run", "--json", "--sample")
    indexed = IndexedDataset.open(toy.data)
    num = (sum(len(indexed.document(i)) for i in range(round(0.1 * indexed.num_documents))) - 1) // 32
    assert len(json.loads(lmtrain(*shown, num))[0]["ids"]) == 32
    change(tmp_path / "run/checkpoints/step_00000001", lambda state: state["data"].pop("shares"))
    assert len(json.loads(lmtrain(*shown, num - 1))[0]["ids"]) == 32
    assert f"is not one of the {num} training samples" in lmtrain(*shown, num, code=2)


@pytest.mark.wide
def test_an_older_run_goes_on_with_the_samples_that_it_had(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"data__split": "[60,40]", "train__steps": 8}
    with monkeypatch.context() as older:
        older.setattr(preflight, "split_rule_of", lambda checkpoint: READ_SHARES)
        lmtrain("pretrain", *toy.settings(tmp_path / "run", **given))
    whole = steps(tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step_00000004"
    changed = given | {"checkpoint__resume": checkpoint, "data__valid_path": toy.data, "train__valid_interval_steps": 8}
    output = lmtrain("pretrain", *toy.settings(tmp_path / "new", **changed), code=65)
    assert "data: train_documents is " in output
    change(checkpoint, lambda state: state["data"].pop("shares"))
    lmtrain("pretrain", *toy.settings(tmp_path / "old", **changed))
    assert [row["loss"] for row in steps(tmp_path / "old")] == [row["loss"] for row in whole[4:]]
    assert "at step 8" in lmtrain("pretrain", *toy.settings(tmp_path / "run", **given | {"train__steps": 9}))
    again = changed | {"checkpoint__resume": "auto", "train__steps": 9}
    assert "at step 8" in lmtrain("pretrain", *toy.settings(tmp_path / "old", **again))


@pytest.mark.wide
def test_an_older_run_goes_on_without_what_it_never_read(toy: Toy, tmp_path: Path) -> None:
    """Its checkpoint has a setting that a run is now refused with."""
    lmtrain("pretrain", *toy.settings(tmp_path / "run", train__steps=4))
    checkpoint = tmp_path / "run/checkpoints/step_00000004"
    change(checkpoint, lambda state: state["model"].update(rotary_base=500.0))
    assert json.loads(lmtrain("inspect", checkpoint, "--json"))["step"] == 4
    assert "at step 4" in lmtrain("pretrain", *toy.settings(tmp_path / "run", train__steps=5))
    begun = toy.settings(tmp_path / "new", train__steps=3, checkpoint__init_from=checkpoint)
    assert "trained for 4 steps" in lmtrain("pretrain", *begun, "--dry-run")


def test_padding_is_not_counted(toy: Toy, tmp_path: Path) -> None:
    given = {"data__packing": "document", "data__split": "[1]", "train__steps": 24, "model__seq_len": 128}
    settings = toy.settings(tmp_path / "run", **given)
    assert "count it, metrics do not" in lmtrain("pretrain", *settings, "--dry-run")
    lmtrain("pretrain", *settings)
    rows = steps(tmp_path / "run")
    indexed = IndexedDataset.open(toy.data)
    filled = Packing.of(DocumentMap.of(indexed), range(indexed.num_documents), 128, "document").filled
    assert rows[-1]["tokens"] % 128
    assert rows[-1]["tokens"] < 24 * 4 * 128
    taken = np.diff([0, *(row["tokens"] for row in rows)])
    assert (taken >= 4 * filled.min()).all()
    each = [row["flops_per_s"] / row["tokens_per_s"] for row in rows[1:]]  # a first step is no measure of speed
    assert each == pytest.approx([each[0]] * 23)
