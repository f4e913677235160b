"""Which checkpoints exist, which is newest, what is swept and what stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint import find_and_prune
from lmtrain.checkpoint.disk import checkpoint_format as format_
from lmtrain.checkpoint.disk.safetensors_file import RankData
from lmtrain.checkpoint.find_and_prune import (
    clear_leftovers,
    latest_checkpoint,
    list_broken,
    list_checkpoints,
    list_damaged,
    load_manifest,
    new_leftover_path,
    newer_checkpoints,
    previous_checkpoint,
    prune_checkpoints,
    resolve_checkpoint,
)
from lmtrain.checkpoint.save.commit import save_checkpoint
from lmtrain.errors import CheckpointError, MissingInputError
from lmtrain.runfolder.file_names import LINEAGE, step_folder_name, step_from_name
from lmtrain.runfolder.lineage import RESUMED, Parent


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        save_checkpoint(folder, step, RankData([], []), {"step": step}, {})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_order_is_by_step_and_not_by_text_or_time(tmp_path: Path) -> None:
    save(tmp_path, 100_000_000, 9, 99_999_999)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_00000009", "step_99999999", "step_100000000"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step_100000000"


def damage(folder: Path, step: int) -> Path:
    path = folder / step_folder_name(step)
    (path / "manifest.json").write_text('{"format": "lmtrain chec')
    return path


def test_what_has_no_checkpoint_s_name_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, 5)
    (tmp_path / "step_7").mkdir()
    (tmp_path / "notes").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step_00000005"
    assert list_checkpoints(tmp_path / "nowhere") == []
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_a_damaged_newest_one_is_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 1, 5, 8)
    (tmp_path / "step_00000006").mkdir()
    (tmp_path / "step_00000007").write_text("a file")
    newest = damage(tmp_path, 8)
    assert latest_checkpoint(tmp_path) == resolve_checkpoint(tmp_path) == newest
    assert list_broken(tmp_path) == [tmp_path / "step_00000006", tmp_path / "step_00000007", newest]
    assert previous_checkpoint(newest) == tmp_path / "step_00000005"
    assert previous_checkpoint(tmp_path / "step_00000001") is None
    assert newer_checkpoints(tmp_path / "step_00000005") == list_broken(tmp_path)
    with pytest.raises(CheckpointError, match=r"manifest.json is not valid .* before it is .*step_00000005\.$"):
        load_manifest(newest)


@pytest.mark.parametrize("leads", ["nowhere", "step_00000009"])
def test_a_link_that_leads_nowhere_is_no_reason_to_take_an_older_one(tmp_path: Path, leads: str) -> None:
    save(tmp_path, 1)
    (tmp_path / "step_00000009").symlink_to(leads)
    assert latest_checkpoint(tmp_path) == resolve_checkpoint(tmp_path) == tmp_path / "step_00000009"
    with pytest.raises(CheckpointError, match=r"before it is .*step_00000001\.$"):
        load_manifest(tmp_path / "step_00000009")


def test_damage_is_seen_again_after_each_change(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = tmp_path / "step_00000001" / "manifest.json"
    whole = manifest.read_bytes()
    for _ in range(2):
        assert list_broken(tmp_path) == []
        manifest.write_bytes(whole.replace(b'"step"', b'"stop"'))
        assert list_checkpoints(tmp_path) == []
        manifest.write_bytes(whole)


def test_a_damaged_one_is_neither_replaced_nor_counted_nor_removed(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    for number in (1, 2):
        damage(tmp_path, 3)
        save(tmp_path, 3)
        assert len(list_damaged(tmp_path)) == number
    damage(tmp_path, 2)
    assert prune_checkpoints(tmp_path, 1) == ["step_00000001"]
    assert names(tmp_path) == [
        "step_00000002", "step_00000003", "step_00000003.damaged-1", "step_00000003.damaged-2",
    ]  # fmt: skip
    assert clear_leftovers(tmp_path) == []


def test_a_newer_format_counts_so_that_it_is_refused_and_not_overlooked(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    manifest = tmp_path / "step_00000002" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_bytes()), "version": 2}))
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_00000001", "step_00000002"]
    with pytest.raises(CheckpointError, match=r"Install a newer lmtrain\.$"):
        load_manifest(tmp_path / "step_00000002")


def test_a_manifest_beyond_the_usual_needs_tensors_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    step = tmp_path / "step_00000001"
    for module in (format_, find_and_prune):
        monkeypatch.setattr(module, "MAX_JSON_BYTES", 100)
    with pytest.raises(CheckpointError, match="larger than 100 B"):
        load_manifest(step)
    (step / "rank_00000.safetensors").write_bytes(bytes(1 << 20))
    assert load_manifest(step).step == 1


def test_resolve_takes_a_checkpoint_a_run_or_its_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run / "checkpoints", 1, 2)
    newest = run / "checkpoints" / "step_00000002"
    assert [resolve_checkpoint(path) for path in (run, run / "checkpoints", str(newest))] == [newest] * 3
    assert resolve_checkpoint(run / "checkpoints" / "step_00000001").name == "step_00000001"


def test_resolve_says_what_it_missed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingInputError, match="nowhere does not exist"):
        resolve_checkpoint(tmp_path / "nowhere")
    with pytest.raises(MissingInputError, match="file is not a folder"):
        resolve_checkpoint(tmp_path / "file")
    with pytest.raises(MissingInputError, match="holds no finished checkpoint"):
        resolve_checkpoint(tmp_path)


@pytest.mark.parametrize(("keep", "left"), [
    (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4]), ("all", [1, 2, 3, 4]), (0, [4]), (-5, [4])
])  # fmt: skip
def test_prune_keeps_the_newest(tmp_path: Path, keep: Any, left: list[int]) -> None:
    save(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step_00000009").mkdir()
    removed = prune_checkpoints(tmp_path, keep)
    assert [step_from_name(p.name) for p in list_checkpoints(tmp_path)] == left
    assert len(removed) == 4 - len(left)
    assert names(tmp_path) == [step_folder_name(s) for s in [*left, 9]]


@pytest.mark.parametrize(
    ("every", "left"), [(10, [10, 20, 25, 30]), (20, [20, 25, 30]), (7, [25, 30]), (None, [25, 30])]
)
def test_prune_keeps_every_nth_for_good(tmp_path: Path, every: int | None, left: list[int]) -> None:
    save(tmp_path, 5, 10, 15, 20, 25, 30)
    prune_checkpoints(tmp_path, 2, keep_every_steps=every)
    assert [step_from_name(p.name) for p in list_checkpoints(tmp_path)] == left


def test_prune_keeps_what_a_branch_that_has_saved_nothing_begins_from(tmp_path: Path) -> None:
    folder, branch = tmp_path / "trunk/checkpoints", tmp_path / "branch"
    save(folder, 5, 10, 15)
    branch.mkdir()
    parent = Parent(RESUMED, "trunk", str(tmp_path / "trunk"), str(folder / "step_00000010"), 10, "")
    (branch / LINEAGE).write_text(json.dumps([parent.to_dict()]))
    assert prune_checkpoints(folder, 1) == ["step_00000005"]
    save(branch / "checkpoints", 12)
    assert prune_checkpoints(folder, 1) == ["step_00000010"]


def test_prune_keeps_chosen_steps_for_good(tmp_path: Path) -> None:
    save(tmp_path, 5, 10, 15, 20, 25, 30)
    assert prune_checkpoints(tmp_path, 1, keep_every_steps=20, keep_steps=(5, 15, 99)) == [
        "step_00000010", "step_00000025",
    ]  # fmt: skip
    assert prune_checkpoints(tmp_path, 1, keep_steps=[15]) == ["step_00000005", "step_00000020"]


def test_prune_leaves_links_alone(tmp_path: Path) -> None:
    save(tmp_path / "elsewhere", 1)
    save(tmp_path / "run", 2, 3)
    (tmp_path / "run" / "step_00000001").symlink_to(tmp_path / "elsewhere" / "step_00000001")
    assert prune_checkpoints(tmp_path / "run", 1) == ["step_00000002"]
    assert resolve_checkpoint(tmp_path / "run" / "step_00000001").is_dir()


def test_sweep_takes_leftovers_only(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for step in (1, 2):
        leftover = new_leftover_path(tmp_path, step)
        leftover.mkdir()
        (leftover / "rank_00000.safetensors").write_bytes(b"half")
    (tmp_path / "step_00000003.tmp-mine").mkdir()
    (tmp_path / "precious").mkdir()
    (tmp_path / "step_00000004.tmp-1-1").symlink_to(tmp_path / "precious")
    assert len(clear_leftovers(tmp_path)) == 2
    assert names(tmp_path) == ["precious", "step_00000001", "step_00000003.tmp-mine", "step_00000004.tmp-1-1"]
    assert clear_leftovers(tmp_path) == []
    assert clear_leftovers(tmp_path / "nowhere") == []


def test_sweep_brings_back_a_checkpoint_whose_replacement_never_came(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000001.replaced-5-0")
    assert latest_checkpoint(tmp_path) is None
    clear_leftovers(tmp_path)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_00000001"


def test_sweep_drops_a_checkpoint_that_was_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000001.replaced-5-0")
    save_checkpoint(tmp_path, 1, RankData([], []), {"step": 1, "new": True}, {})
    clear_leftovers(tmp_path)
    assert names(tmp_path) == ["step_00000001"]
    assert json.loads((tmp_path / "step_00000001" / "manifest.json").read_bytes())["state"]["new"]
