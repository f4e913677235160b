"""Which checkpoint is the best, and that it stays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.checkpoint.disk.safetensors_file import RankData
from lmtrain.checkpoint.find_and_prune import prune_checkpoints, rank_checkpoints, resolve_checkpoint
from lmtrain.checkpoint.save.commit import save_checkpoint
from lmtrain.errors import LmtrainError, MissingInputError
from lmtrain.runfolder.file_names import step_folder_name


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, None]), min_size=1, max_size=9), st.integers(0, 3), st.integers(1, 3))
def test_the_best_of_all_that_were_saved_is_there_after_every_save(
    worths: list[float | None], keep_best: int, keep_last: int
) -> None:
    """As a run saves and measures, a step after another; equal ones included."""
    there: dict[int, Path] = {}
    worth: dict[int, float] = {}
    for step, value in enumerate(worths, 1):
        there[step] = Path(str(step))
        worth |= {} if value is None else {step: value}
        good = rank_checkpoints(there, worth)[:keep_best]
        there = {one: path for one, path in there.items() if path in good or one in sorted(there)[-keep_last:]}
        wanted = sorted((-value, one) for one, value in worth.items())[:keep_best]
        assert {one for _, one in wanted} <= there.keys()


def run(folder: Path, losses: Mapping[int, float], **checkpoint: object) -> Path:
    for step in losses:
        save_checkpoint(folder / "checkpoints", step, RankData([], []), {"step": step}, {})
    rows = [{"event": "valid", "step": step, "attempt": 1, "loss": loss} for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps({"checkpoint": checkpoint}))
    return folder


def test_pruning_leaves_the_best(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {1: 3.0, 2: 2.0, 3: 2.5, 4: 4.0, 5: 3.5}) / "checkpoints"
    assert prune_checkpoints(folder, 1, keep_best=2, scores={1: -3.0, 2: -2.0, 3: -2.5, 4: -4.0}) == [
        "step_00000001", "step_00000004"
    ]  # fmt: skip
    assert sorted(path.name for path in folder.iterdir()) == [step_folder_name(step) for step in (2, 3, 5)]


def test_a_name_for_the_best(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", {1: 3.0, 2: 2.0, 3: 2.5})
    assert resolve_checkpoint(f"{folder}@best") == folder / "checkpoints/step_00000002"
    assert resolve_checkpoint(folder) == folder / "checkpoints/step_00000003"
    (folder.with_name("b@best")).mkdir()
    run(folder.with_name("b@best"), {7: 1.0})
    assert resolve_checkpoint(folder.with_name("b@best")).name == "step_00000007"  # a folder of that name is itself


@pytest.mark.parametrize("by", ["valid/ppl", "eval/x/y"])
def test_without_a_measure_there_is_no_best(tmp_path: Path, by: str) -> None:
    folder = run(tmp_path / "a", {1: 3.0}, best_by=by)
    with pytest.raises(MissingInputError, match=f"a@best does not exist, because .*a has a value of {by}"):
        resolve_checkpoint(f"{folder}@best")


def test_what_is_no_run_has_no_best(tmp_path: Path) -> None:
    with pytest.raises(LmtrainError, match=r"none/\w+\.jsonl? does not exist"):
        resolve_checkpoint(tmp_path / "none@best")
