"""What cannot be merged, and where it differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.errors import CheckpointError, UsageError
from lmtrain.models.gpt_settings import GPTSettings
from tests.unit.checkpoint.layouts import draw, reshard_to, write
from tests.unit.checkpoint.merge.merges import SMALL, merged, write_step

ROTARY = replace(SMALL, positions="rotary")


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [
        (SMALL, replace(SMALL, width=16), r"model\.width is 8 in .*step_00000001 and 16 in .*step_00000002"),
        (ROTARY, replace(ROTARY, rotary_base=5000.0), r"model\.rotary_base is 10000.* in .* and 5000"),
        (SMALL, replace(SMALL, seq_len=8), r"model\.num_positions is 4 in .* and 8 in"),
        (SMALL, ROTARY, r"model\.positions is learned in .* and rotary in"),
    ],
    ids=["width", "rotary_base", "positions", "kind_of_positions"],
)
def test_other_models_are_refused_with_where(
    tmp_path: Path, first: GPTSettings, second: GPTSettings, where: str
) -> None:
    paths = [write_step(tmp_path, step, model=model) for step, model in enumerate((first, second), 1)]
    with pytest.raises(CheckpointError, match=rf"cannot be merged: .*{where}.*Merge checkpoints of one model"):
        merged(paths, force=True)


def test_settings_that_training_alone_reads_may_differ(tmp_path: Path) -> None:
    other = replace(ROTARY, dropout=0.1, init_std=0.5, seq_len=8)
    assert merged([write_step(tmp_path, 1, model=ROTARY), write_step(tmp_path, 2, model=other)]).parents


def test_other_tokenizers_and_types_are_refused(tmp_path: Path) -> None:
    halves = {name: value.astype(np.float16) if "model" in name else value for name, value in draw(SMALL).items()}
    paths = [
        write_step(tmp_path, 1, tokenizer={"fingerprint": "a" * 64}),
        write_step(tmp_path, 2, tokenizer={"fingerprint": "b" * 64}),
        write(tmp_path / "checkpoints", SMALL, "tp=1", halves, 3, samples=1),
    ]
    with pytest.raises(CheckpointError, match=r"fingerprint aaaaaaaaaaaa and that of .*step_00000002 bbbbbbbbbbbb\."):
        merged(paths[:2])
    with pytest.raises(CheckpointError, match=r"step_00000003 holds model\..* as float16.* merged in float32"):
        merged([paths[0], paths[2]])


@pytest.mark.wide
def test_the_same_checkpoint_twice_is_refused(tmp_path: Path) -> None:
    paths = [write_step(tmp_path, step) for step in (1, 2)]
    reshard_to(paths[0], tmp_path / "copy", "tp=2")
    for again in (paths[0], tmp_path / "copy"):
        for order in ([*paths, again], [again, *paths]):
            with pytest.raises(UsageError, match=r"once more, or a copy of it\. Give each checkpoint once"):
                merged(order)


def parent(run: Path, digest: str = "c" * 64) -> dict[str, Any]:
    return {
        "kind": "run", "run": str(run), "path": str(run), "checkpoint": str(run / "checkpoints" / "step_00000001"),
        "step": 1, "manifest_sha256": digest,
    }  # fmt: skip


def settings(run_dir: str, init_from: str | None = None) -> dict[str, Any]:
    return {"run": {"dir": run_dir}, "checkpoint": {"init_from": init_from}}


@pytest.mark.wide
def test_checkpoints_without_a_common_ancestor_are_refused_unless_forced(tmp_path: Path) -> None:
    """Checkpoints of other seeds, folders, models and first weights are strangers."""
    alone: dict[str, Any] = {"seed": 1, "settings": settings("runs/a")}
    strangers: list[dict[str, Any]] = [
        {"seed": 2, "settings": settings("runs/a")},
        {"seed": 1, "settings": settings("runs/b", "hub/a")},
        {"seed": 1, "settings": settings("runs/b"), "lineage": [parent(tmp_path / "elsewhere")]},
        {"seed": 1, "settings": settings("runs/b"), "model": replace(SMALL, init_std=0.5)},
        {"samples": 40, "seed": None, "settings": None},
    ]
    first = write_step(tmp_path / "first", 1, **alone)
    for number, state in enumerate(strangers):
        second = write_step(tmp_path / f"second{number}", 2, **state)
        with pytest.raises(CheckpointError, match=r"have no common ancestor: .*or add --force"):
            merged([first, second])
        assert merged([first, second], force=True).parents


@pytest.mark.wide
def test_common_ancestors(tmp_path: Path) -> None:
    """Pairs in folders of their own: what they share is in their states alone."""
    trunk, branch = parent(tmp_path / "trunk"), [parent(tmp_path / "moved"), parent(tmp_path / "branch", "d" * 64)]
    record = {"mean": "uniform", "moments": "none", "parents": [trunk | {"weight": 1.0}]}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"settings": settings("runs/a")}, {"settings": settings("runs/b")}),  # one seed and one model
        ({"settings": settings("runs/a", "hub/a")}, {"settings": settings("runs/a")}),  # copies of one run
        ({"settings": settings("runs/a", "hub/a"), "seed": 1}, {"settings": settings("runs/b", "hub/a"), "seed": 2}),
        ({"lineage": [trunk], "seed": 1}, {"lineage": branch, "seed": 2}),  # one checkpoint, moved since
        ({"lineage": [trunk]}, {"lineage": [parent(tmp_path / "trunk", "e" * 64)]}),
        ({"lineage": [trunk]}, {"lineage": [branch[1]], "merged": record}),
    ]
    for number, (first, second) in enumerate(pairs):
        paths = [
            write_step(tmp_path / f"{name}{number}", step, **state)
            for step, (name, state) in enumerate((("first", first), ("second", second)), 1)
        ]
        assert merged(paths).parents
    trunk_path = write_step(tmp_path / "trunk", 1, seed=3)
    assert merged([trunk_path, write_step(tmp_path / "third", 4, seed=4, lineage=[trunk])]).parents
