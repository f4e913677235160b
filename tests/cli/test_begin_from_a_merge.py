"""--from-run MERGED: a run goes on from a merge with the settings of its newest parent's run, and how it is shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lmtrain.runfolder.lineage import read_lineage
from lmtrain.runfolder.metrics_rows import read_metrics
from tests.cli.harness import Toy, lmtrain, on_terminal

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def family(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trunk, a branch of it, the merge of the newest checkpoints of both, and a run from the merge."""
    runs = tmp_path_factory.mktemp("family")
    constant = {"schedule": "constant", "model__positions": "rotary", "checkpoint__keep_last": 3}
    lmtrain("pretrain", *toy.settings(runs / "trunk", **constant))
    branch = ("--from-run", runs / "trunk/checkpoints/step_00000004", f"run.dir={runs / 'branch'}", "train.steps=16")
    lmtrain("pretrain", *branch)
    lmtrain("merge", runs / "trunk", runs / "branch", "--output", runs / "mean")
    lmtrain("pretrain", *child(runs), f"run.dir={runs / 'child'}")
    return runs


def child(runs: Path) -> tuple[object, ...]:
    return ("--from-run", runs / "mean", "model.seq_len=16", "train.steps=20")


def test_it_goes_on_where_the_newest_parent_was_in_a_stage_of_its_own(family: Path) -> None:
    rows = [row for row in read_metrics(family / "child/metrics.jsonl") if row["event"] == "step"]
    assert [(row["step"], row["stage"]) for row in rows] == [(step, "branch") for step in (17, 18, 19, 20)]
    assert rows[0]["tokens"] == 16 * 4 * 32 + 4 * 16
    assert [(parent.kind, Path(parent.run).name, parent.step) for parent in read_lineage(family / "child")] == [
        ("run", "trunk", 4), ("merge", "branch", 16), ("run", "mean", 16),
    ]  # fmt: skip


def test_the_tree_has_the_merge_below_its_newest_parents_run(family: Path, tmp_path: Path) -> None:
    rows = json.loads(lmtrain("runs", "--tree", family, "--json"))
    assert [(row["name"], row["depth"], row["branch_step"], row["begins_with"]) for row in rows] == [
        ("trunk", 0, None, None), ("branch", 1, 4, "run"), ("mean", 2, 16, "merge"), ("child", 3, 16, "run"),
    ]  # fmt: skip
    assert rows[2]["why"] == f"uniform mean of 2 checkpoints of steps 12 to 16, some of {family / 'trunk'}"
    for columns in (80, 120):
        line = on_terminal("runs", "--tree", family, columns=columns).splitlines()[3]
        assert line.split()[:4] == ["mean", "16", "(merge)", "merged"]
        assert len(line) <= columns


def test_inspect_and_report_say_what_was_merged(family: Path, tmp_path: Path) -> None:
    made = "uniform mean of 2 checkpoints of steps 12 to 16"
    shown = " ".join(lmtrain("inspect", family / "child").split())
    assert f"descends from {family / 'mean'} at step 16, {made}, some of {family / 'trunk'}: " in shown
    assert f"descends from a merge, whose newest checkpoint is of {family / 'branch'} at step 16" in shown
    shown = " ".join(lmtrain("inspect", family / "mean").split())
    assert f"merged {made}; moments of the optimizer: the newest parent's" in shown
    assert f"weight 0.5000 {family / 'trunk/checkpoints/step_00000012'}, step 12" in shown
    shown = lmtrain("inspect", family / "branch", "--diff", family / "mean")
    assert f"  merged: None -> {made}\n" in shown
    assert "merged.parents" not in shown
    output = lmtrain("generate", family / "mean", "--prompt", "a", "--max-new-tokens", 1, "--json")
    assert json.loads(output)["model"]["merged"] == made
    lmtrain("report", family / "child", "--output", tmp_path / "report.html")
    assert f"{family / 'mean'} at step 16, {made}" in (tmp_path / "report.html").read_text()


def test_what_a_merge_cannot_give_is_refused(family: Path, tmp_path: Path) -> None:
    told = lmtrain("pretrain", *child(family), code=2)
    assert "a run that begins from it needs a folder of its own" in told
    assert f"run.dir={family / 'branch'} is that of its newest parent. Give run.dir=DIR." in told
    shutil.copytree(family / "trunk", tmp_path / "trunk")
    lmtrain("merge", "--last", 2, "--of", tmp_path / "trunk", "--output", tmp_path / "mean")
    shutil.rmtree(tmp_path / "trunk")
    told = lmtrain("pretrain", "--from-run", tmp_path / "mean", f"run.dir={tmp_path / 'next'}", code=66)
    assert "the run of its newest parent, whose settings a branch takes, is not there any more" in told
    assert f"checkpoint.init_from={tmp_path / 'mean'} to begin with its weights." in told
