"""What differs between two checkpoints, number by number."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lmtrain.checkpoint import compare_or_verify_checkpoints
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.checkpoint.save.background_writer import CheckpointWriter
from lmtrain.checkpoint.save.commit import save_checkpoint
from lmtrain.errors import CheckpointError
from lmtrain.layout import Piece
from lmtrain.runfolder.settings_differences import differences
from tests.unit.checkpoint.arrays import rank_data
from tests.unit.checkpoint.layouts import MODELS, draw, write


def test_layouts_do_not_differ_and_runs_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_or_verify_checkpoints, "_PART_ITEMS", 100)
    model = MODELS["gqa"]
    one, two = draw(model), draw(model)
    name = "optim.exp_avg.blocks.1.mlp.up.weight"
    two[name] = two[name].copy()
    two[name][3, 4] += 2.5
    two[name][79, 23] = np.nan
    two["model.extra"] = two.pop("optim.seen")
    a = Contents(write(tmp_path / "a", model, "tp=2", one))
    same = Contents(write(tmp_path / "same", model, "pp=2,dp=2", one))
    b = Contents(write(tmp_path / "b", model, "pp=2", two, step=9))
    assert list(compare_or_verify_checkpoints.value_differences(a, same)) == []
    assert compare_or_verify_checkpoints.missing_names(a, same) == ([], [])
    assert differences([a.manifest.state, same.manifest.state]) == {
        "settings.parallel.pp": [1, 2], "settings.parallel.tp": [2, 1], "settings.parallel.dp_shard": [1, 2]
    }  # fmt: skip
    assert compare_or_verify_checkpoints.missing_names(a, b) == (["optim.seen"], ["model.extra"])
    assert differences([a.manifest.state, b.manifest.state])["step"] == [7, 9]
    ((found, how),) = compare_or_verify_checkpoints.value_differences(a, b)
    assert (found, how.num_different, how.num_values) == (name, 2, 80 * 24)
    assert how.largest == math.inf
    assert how.scale == pytest.approx(np.abs(one[name]).max())


def test_the_largest_difference_is_that_of_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_or_verify_checkpoints, "_PART_ITEMS", 4)
    changed = np.zeros(20, np.float32)
    changed[[1, 16]] = 8.0, 0.5
    for step, values in enumerate([np.zeros(20, np.float32), changed]):
        save_checkpoint(tmp_path, step, rank_data([Piece("w", (20,), (0,), values)]), {}, {})
    a, b = (Contents(tmp_path / f"step_{step:08d}") for step in range(2))
    ((_, how),) = compare_or_verify_checkpoints.value_differences(a, b)
    assert (how.num_different, how.largest, how.scale) == (2, 8.0, 0.0)
    ((_, how),) = compare_or_verify_checkpoints.value_differences(b, a)
    assert (how.num_different, how.largest, how.scale) == (2, 8.0, 8.0)


def test_types_and_shapes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for step, (dtype, value) in enumerate([(torch.bfloat16, 1.0), (torch.bfloat16, 1.5), (torch.float32, 1.0)]):
        with CheckpointWriter(tmp_path, keep_last=9, asynchronous=False) as writer:
            writer.save(step, [Piece("w", (3,), (0,), torch.full((3,), value, dtype=dtype))], {}, {})
    shapes = rank_data([Piece("w", (1, 3), (0, 0), np.ones((1, 3), np.float32))])
    save_checkpoint(tmp_path, 3, shapes, {}, {})
    a, b, c, d = (Contents(tmp_path / f"step_{step:08d}") for step in range(4))
    ((_, how),) = compare_or_verify_checkpoints.value_differences(a, b)
    assert (how.num_different, how.largest, how.scale) == (3, 0.5, 1.0)
    assert compare_or_verify_checkpoints.type_differences(a, c) == {"w": ("BF16 [3]", "F32 [3]")}
    assert compare_or_verify_checkpoints.type_differences(c, d) == {"w": ("F32 [3]", "F32 [1, 3]")}
    assert list(compare_or_verify_checkpoints.value_differences(a, c)) == []


def test_beside_what_is_damaged_stands_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [{"checkpoint": f"r/checkpoints/step_{step}", "problems": []} for step in (1, 2)]
    compare_or_verify_checkpoints.raise_problems(found)
    found.append({"checkpoint": "r/checkpoints/step_3", "problems": ["it is damaged."]})
    with pytest.raises(CheckpointError, match=r"intact checkpoint is r/checkpoints/step_2; `lmtrain pretrain"):
        compare_or_verify_checkpoints.raise_problems(found)
    older = {"checkpoint": "r/checkpoints/step_0", "problems": ["it is damaged."]}
    with pytest.raises(CheckpointError, match=r"The newest, r/checkpoints/step_2, is intact: the run resumes"):
        compare_or_verify_checkpoints.raise_problems([older, *found[:2]])
    with pytest.raises(CheckpointError, match=r"it is damaged\.$"):
        compare_or_verify_checkpoints.raise_problems(found[2:])
    steps = ("step_1", "step_3")
    monkeypatch.setattr(compare_or_verify_checkpoints, "list_checkpoints", lambda run: [run / step for step in steps])
    with pytest.raises(CheckpointError, match=r"it is damaged\.\n`lmtrain verify r` verifies all checkpoints of"):
        compare_or_verify_checkpoints.raise_problems(found[2:])
