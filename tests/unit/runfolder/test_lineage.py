"""The checkpoints from which a run descends, as its folder records them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmtrain.errors import DataError
from lmtrain.runfolder.file_names import LINEAGE
from lmtrain.runfolder.lineage import RESUMED, Parent, parse_lineage, read_lineage, waiting_branches


def write_lineage(run: Path, parents: list[Parent]) -> None:
    (run / LINEAGE).write_text(json.dumps([each.to_dict() for each in parents]))


def parent(run: Path, step: int) -> Parent:
    checkpoint = run.resolve() / "checkpoints" / f"step_{step:08d}"
    return Parent(RESUMED, str(run), str(run.resolve()), str(checkpoint), step, "a" * 64, {"optim.lr": [1e-3, 1e-4]})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_lineage(tmp_path) == []
    parents = [parent(tmp_path / "a", 5), parent(tmp_path / "b", 9)]
    write_lineage(tmp_path, parents)
    assert read_lineage(tmp_path) == parents


@pytest.mark.parametrize("damage", [{"step": True}, {"kind": None}, {"differences": []}])
def test_a_damaged_record_is_refused_by_its_name(tmp_path: Path, damage: dict[str, object]) -> None:
    with pytest.raises(DataError, match=LINEAGE):
        parse_lineage([parent(tmp_path, 5).to_dict() | damage], tmp_path / LINEAGE)


def test_a_branch_waits_for_its_parents_checkpoint_until_it_has_one(tmp_path: Path) -> None:
    trunk, branch, other = (tmp_path / name for name in ("trunk", "branch", "other"))
    for folder in (trunk, branch, other):
        folder.mkdir()
    write_lineage(branch, [parent(other, 3), parent(trunk, 5)])
    write_lineage(other, [parent(branch, 7)])
    assert [*waiting_branches(trunk)] == [(branch, "step_00000005")]
    (branch / "checkpoints/step_00000006").mkdir(parents=True)
    assert [*waiting_branches(trunk)] == []
