"""`lmtrain runs --tree`: each branch below the run from which it began, whether that is listed, elsewhere or gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST, Manifest, encode_manifest
from lmtrain.cli.inspect.run_folder_view import lineage_lines
from lmtrain.cli.runs.runs_command import print_runs
from lmtrain.runfolder.folder_reader import RunFolder
from lmtrain.runfolder.lineage import MERGED, RESUMED, WEIGHTS, Parent, read_lineage
from lmtrain.start.facts_of_outputs.family_of_runs import family_rows
from tests.cli.harness import on_terminal


def row(path: Path) -> dict[str, Any]:
    return {
        "run": str(path), "name": path.name, "state": "finished", "step": 1200, "steps": 1200, "stage": None,
        "loss": 3.25,
        "loss/valid": 3.5, "tokens_per_s": 1e6, "tokens": 10, "last_row": None, "why": "", "missing": [],
    }  # fmt: skip


def begin(folder: Path, *parents: tuple[Path, int], kind: str = RESUMED) -> Path:
    """A run folder with these ancestors, oldest first."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("")
    entries = [
        Parent(kind, str(run), str(run), str(run / "checkpoints" / f"step_{step:08d}"), step, "").to_dict()
        for run, step in parents
    ]
    (folder / "lineage.json").write_text(json.dumps(entries))
    return folder


def entry(run: Path, step: int, kind: str = RESUMED) -> Parent:
    return Parent(kind, str(run), str(run), str(run / "checkpoints" / f"step_{step:08d}"), step, "")


def merged(folder: Path, *parents: tuple[Path, int]) -> tuple[Parent, Parent]:
    """A merged checkpoint of the checkpoints of runs, oldest first; the last entries of the lineage of a run from it.
    """
    folder.mkdir(parents=True)
    record = [
        {"run": str(run), "checkpoint": entry(run, step).checkpoint, "step": step, "manifest_sha256": "", "weight": 0.5}
        for run, step in parents
    ]
    newest = entry(*parents[-1], MERGED)
    state = {
        "merged": {"mean": "uniform", "moments": "newest", "parents": record},
        "lineage": [parent.to_dict() for parent in read_lineage(newest.folder)] + [newest.to_dict()],
    }
    (folder / MANIFEST).write_bytes(encode_manifest(Manifest(parents[-1][1], {}, {}, state)))
    return newest, Parent(RESUMED, str(folder), str(folder), str(folder), parents[-1][1], "")


def begin_from_merge(folder: Path, *lineage: Parent) -> Path:
    begin(folder)
    (folder / "lineage.json").write_text(json.dumps([parent.to_dict() for parent in lineage]))
    return folder


def describe(run: RunFolder) -> dict[str, Any]:
    return row(run.path)


def places(rows: list[dict[str, Any]]) -> list[tuple[str, int, int | None, str]]:
    return [(Path(each["run"]).name, each["depth"], each["branch_step"], each["state"]) for each in rows]


def test_branches_stand_below_their_parents_by_step(tmp_path: Path) -> None:
    trunk = begin(tmp_path / "trunk")
    late, early = begin(tmp_path / "a", (trunk, 900)), begin(tmp_path / "b", (trunk, 300))
    child = begin(tmp_path / "c", (trunk, 900), (late, 1000))
    found = family_rows([row(path) for path in (late, early, child, trunk)], describe)
    assert places(found) == [
        ("trunk", 0, None, "finished"), ("b", 1, 300, "finished"), ("a", 1, 900, "finished"),
        ("c", 2, 1000, "finished"),
    ]  # fmt: skip
    assert found[3]["parent"] == str(late)


def test_a_parent_is_shown_that_is_gone_or_was_not_listed(tmp_path: Path) -> None:
    elsewhere, gone = begin(tmp_path / "far" / "trunk"), tmp_path / "gone"
    child = begin(tmp_path / "runs" / "c", (elsewhere, 5), (gone, 8))
    assert places(family_rows([row(child)], describe)) == [
        ("trunk", 0, None, "finished"), ("gone", 1, 5, "gone"), ("c", 2, 8, "finished"),
    ]  # fmt: skip


def test_folders_that_seem_to_descend_from_each_other_are_shown_once(tmp_path: Path) -> None:
    a, b = begin(tmp_path / "a", (tmp_path / "b", 3)), begin(tmp_path / "b", (tmp_path / "a", 5))
    assert sorted(name for name, *_ in places(family_rows([row(a), row(b)], describe))) == ["a", "b"]


def test_the_table_keeps_its_indents_on_a_narrow_terminal(tmp_path: Path, capsys: Any) -> None:
    trunk = begin(tmp_path / "trunk")
    name = "a_run_with_a_name_that_is_much_too_long_for_the_terminal-decay-20k"
    long = begin(tmp_path / name, (trunk, 900), kind=WEIGHTS)
    begin(tmp_path / "below", (trunk, 900), (long, 1000))
    for columns in (80, 120):
        lines = on_terminal("runs", "--tree", tmp_path, columns=columns).splitlines()
        assert all(len(line) <= columns for line in lines)
        assert [line.split()[0] for line in lines[:2]] == ["run", "trunk"]
        assert lines[2].startswith("  …" if columns == 80 else f"  {name}"[:12])
        assert lines[2].split()[1:4] == ["900", "(weights)", "killed"]
        assert lines[3].startswith("    below")
    print_runs([row(trunk)])
    assert "from step" not in capsys.readouterr().out


def test_a_run_from_a_merge_stands_below_it_and_that_below_the_run_of_its_newest_parent(tmp_path: Path) -> None:
    oldest, runs = begin(tmp_path / "oldest"), tmp_path / "runs"
    trunk = begin(tmp_path / "trunk", (oldest, 100))
    lineage = (*read_lineage(trunk), *merged(tmp_path / "mean", (oldest, 300), (trunk, 900)))
    child = begin_from_merge(runs / "child", *lineage)
    found = family_rows([row(child), row(oldest)], describe)
    assert places(found) == [
        ("oldest", 0, None, "finished"), ("trunk", 1, 100, "finished"), ("mean", 2, 900, "merged"),
        ("child", 3, 900, "finished"),
    ]  # fmt: skip
    assert found[2]["why"] == f"uniform mean of 2 checkpoints of steps 300 to 900, some of {oldest}"
    assert [parent["step"] for parent in found[2]["merged"]["parents"]] == [300, 900]
    (tmp_path / "mean" / MANIFEST).unlink()
    gone = family_rows([row(child)], describe)[2]
    assert (gone["state"], gone["why"]) == ("gone", "a merged checkpoint")


def test_merges_beside_the_runs_are_listed(tmp_path: Path) -> None:
    trunk = begin(tmp_path / "trunk", (tmp_path / "gone", 5))
    merged(tmp_path / "mean", (trunk, 300), (trunk, 900))
    found = family_rows([row(trunk)], describe, with_merges=True)
    assert places(found)[1:] == [("trunk", 1, 5, "finished"), ("mean", 2, 900, "merged")]
    assert found[2]["name"] == "mean"
    assert len(family_rows([row(trunk)], describe)) == 2
    for columns in (80, 120):
        lines = on_terminal("runs", "--tree", tmp_path, columns=columns).splitlines()
        assert lines[3].split()[:4] == ["mean", "900", "(merge)", "merged"]
    assert "mean" not in on_terminal("runs", "--tree", tmp_path, "--state", "killed", columns=80)


def test_the_lineage_of_a_run_says_how_its_merge_was_made(tmp_path: Path) -> None:
    trunk = tmp_path / "trunk"
    newest, merge = merged(tmp_path / "mean", (trunk, 300), (trunk, 900))
    lines = [text for _, text in lineage_lines([entry.to_dict() for entry in (newest, merge)])]
    assert lines == [
        f"{merge.run} at step 900, uniform mean of 2 checkpoints of steps 300 to 900: no setting differs",
        f"a merge, whose newest checkpoint is of {trunk} at step 900, which is gone",
    ]


def test_a_damaged_checkpoint_beside_the_runs_is_passed_over(tmp_path: Path) -> None:
    trunk = begin(tmp_path / "trunk")
    merged(tmp_path / "mean", (trunk, 900))
    manifest = tmp_path / "mean" / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b"uniform", b"linear "))
    assert places(family_rows([row(trunk)], describe, with_merges=True)) == [("trunk", 0, None, "finished")]
