"""Branches of a run: on other data, killed, without the trunk; who descends from whom; decays at several steps."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmtrain.runfolder.metrics_rows import read_metrics
from tests.cli.harness import Toy, lmtrain, start

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def other(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another dataset of the same tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    lines = [f"line {n} of another text, with words of its own\n\n" for n in range(900)]
    (folder / "text.txt").write_text("".join(lines))
    words = ["--split", "blank-line", "--tokenizer", toy.tokenizer, "--output", folder / "set"]
    lmtrain("preprocess", folder / "text.txt", *words)
    return folder / "set"


@pytest.fixture(scope="module")
def trained(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trunk") / "trunk"
    lmtrain("pretrain", *settings(toy, folder))
    return folder


@pytest.fixture
def trunk(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trunk, with runs beside it."""
    shutil.copytree(trained, tmp_path / "trunk")
    return tmp_path / "trunk"


def settings(toy: Toy, folder: Path, **overrides: object) -> list[str]:
    return toy.settings(
        folder, schedule="constant", model__positions="rotary", checkpoint__interval_steps=3,
        checkpoint__keep_last=9, **overrides,
    )  # fmt: skip


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def steps(run: Path) -> dict[int, tuple[object, ...]]:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["event"] == "step"]
    return {row["step"]: (row["loss"], row["grad_norm"], row["lr"], row["tokens"], row["samples_hash"]) for row in rows}


def same_tensors(run: Path, other: Path) -> bool:
    found = json.loads(lmtrain("inspect", checkpoint(run, 12), "--diff", checkpoint(other, 12), "--json"))
    return bool(found["same_tensors"])


def killed(step: int) -> dict[str, str]:
    """Return the environment that kills a run when it computes this step, counted from 0."""
    return {"LMTRAIN_FAULT": f"kill:point=step:step={step}", "LMTRAIN_ALLOW_FAULTS": "1"}


def lineage(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "lineage.json").read_text())
    return found


def test_a_branch_with_nothing_changed_is_the_trunk_going_on(trunk: Path, tmp_path: Path) -> None:
    branch = tmp_path / "branch"
    lmtrain("pretrain", "--from-run", checkpoint(trunk, 6), f"run.dir={branch}")
    assert steps(branch) == {step: row for step, row in steps(trunk).items() if step > 6}
    assert same_tensors(trunk, branch)
    assert lineage(branch)[0]["differences"] == {}


def test_other_data_killed_and_without_the_trunk_is_as_unbroken(
    toy: Toy, other: Path, trunk: Path, tmp_path: Path
) -> None:
    """The data of the trunk are away, and after the branch's first checkpoint the trunk is, too."""
    words = ["--from-run", checkpoint(trunk, 6), f"data.path={other}", "model.seq_len=64", "optim.lr=1e-3"]
    words += ["checkpoint.asynchronous=false"]
    whole, branch = tmp_path / "whole", tmp_path / "branch"
    assert "trunk to step 6, branch to step 12" in lmtrain("pretrain", *words, f"run.dir={whole}")
    folder = toy.data.parent
    folder.rename(folder.with_name("away"))
    try:
        process = start("pretrain", *words, f"run.dir={branch}", env=killed(10))
        process.communicate()
        assert process.returncode == -9
        shutil.rmtree(trunk)
        lmtrain("pretrain", "--from-run", branch)
    finally:
        folder.with_name("away").rename(folder)
    assert steps(branch) == steps(whole)
    assert [row[3] for row in steps(whole).values()][:2] == [6 * 4 * 32 + 4 * 64 * n for n in (1, 2)]
    assert same_tensors(whole, branch)


def test_a_grandchild_descends_from_both(other: Path, trunk: Path, tmp_path: Path) -> None:
    child, grandchild, weights = (tmp_path / name for name in ("child", "grandchild", "weights"))
    lmtrain("pretrain", "--from-run", checkpoint(trunk, 6), f"run.dir={child}", f"data.path={other}")
    lmtrain("pretrain", "--from-run", checkpoint(child, 9), f"run.dir={grandchild}", "model.seq_len=16")
    parents = lineage(grandchild)
    assert [(Path(parent["run"]).name, parent["step"]) for parent in parents] == [("trunk", 6), ("child", 9)]
    assert parents[:1] == lineage(child)
    assert parents[1]["differences"]["stages.branch.steps"] == [6, 3]
    facts = json.loads(lmtrain("inspect", checkpoint(grandchild, 12), "--json"))
    assert facts["lineage"] == parents
    assert f"{child} at step 9: stages.branch.steps=3 (6 there)" in lmtrain("inspect", grandchild)
    words = [f"run.dir={weights}", f"checkpoint.init_from={trunk}", "checkpoint.resume=auto", "train.steps=3"]
    lmtrain("pretrain", "--from-run", trunk, *words, "optim.lr=1e-5")
    assert f"the weights of {trunk} at step 12: optim.lr=1e-05 (0.003 there)" in lmtrain("inspect", weights)


def test_the_parent_must_stay_what_it_was(other: Path, trunk: Path, tmp_path: Path) -> None:
    branch, words = tmp_path / "branch", ["--from-run", trunk, f"run.dir={tmp_path / 'branch'}", f"data.path={other}"]
    words += ["train.steps=16", "checkpoint.interval_steps=4"]
    process = start("pretrain", *words, env=killed(13))
    process.communicate()
    assert not (branch / "checkpoints").exists()
    manifest = checkpoint(trunk, 12) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    told = lmtrain("pretrain", *words, code=65)
    assert f"began from the checkpoint {checkpoint(trunk, 12).resolve()}, and another checkpoint is there now" in told


def test_the_same_command_goes_on_when_the_trunk_has_removed_the_checkpoint(trunk: Path, tmp_path: Path) -> None:
    branch = tmp_path / "branch"
    words = ["--from-run", checkpoint(trunk, 6), f"run.dir={branch}", "model.seq_len=16"]
    process = start("pretrain", *words, "checkpoint.asynchronous=false", env=killed(10))
    process.communicate()
    shutil.rmtree(checkpoint(trunk, 6))
    assert f"continuing from {checkpoint(branch, 9)}" in lmtrain("pretrain", *words)
    other = ["--from-run", checkpoint(trunk, 6), f"run.dir={tmp_path / 'another'}"]
    assert "does not exist" in lmtrain("pretrain", *other, code=66)
    for step in (3, 9, 12):
        shutil.rmtree(checkpoint(trunk, step))
    for source in (trunk, checkpoint(trunk, 6)):  # by the trunk's folder, which holds no checkpoint any more
        said = lmtrain("pretrain", "--from-run", source, *words[2:], "train.steps=13")
        assert f"continuing from {checkpoint(branch, 12)}" in said or "done: 13 steps" in said
    shutil.rmtree(trunk)
    assert f"goes on with: lmtrain pretrain --from-run {branch}" in lmtrain("pretrain", *words, code=66)


def test_a_branch_that_has_saved_nothing_begins_where_it_began_though_the_trunk_went_on(
    other: Path, trunk: Path, tmp_path: Path
) -> None:
    branch = tmp_path / "branch"
    shutil.move(checkpoint(trunk, 12), tmp_path / "newest")  # the trunk stands at step 9
    words = ["--from-run", trunk, f"run.dir={branch}", f"data.path={other}", "checkpoint.interval_steps=4"]
    words += ["train.steps=13"]
    start("pretrain", *words, env=killed(10)).communicate()
    shutil.move(tmp_path / "newest", checkpoint(trunk, 12))
    lmtrain("pretrain", *words)
    assert lineage(branch)[0]["step"] == 9
    assert json.loads((branch / "config.json").read_text())["stages"]["trunk"] == {"steps": 9}
    assert [*steps(branch)] == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["optim=lamb", "model.seq_len=64"], "optim.kind is lamb, and was adamw.*checkpoint.init_from="),
        (["model.width=64", "model.seq_len=64"], "model.width is 64, and was 32"),
        (["train.seed=5", "train.global_batch=8"], "train.seed is 5, and was 1234"),
    ],
)
def test_what_no_branch_can_change(trunk: Path, tmp_path: Path, words: list[str], text: str) -> None:
    told = lmtrain("pretrain", "--from-run", trunk, "train.steps=20", f"run.dir={tmp_path / 'b'}", *words, code=65)
    assert re.search(text, told), told
    assert not (tmp_path / "b/checkpoints").exists()


def test_decays_at_several_steps(trunk: Path, tmp_path: Path) -> None:
    words = ["--decay", "40%", "--shape", "sqrt", "train.valid_interval_steps=0"]
    printed = lmtrain("branch", trunk, "--at", "6,9", *words)
    lines = [shlex.split(line) for line in printed.splitlines()]
    assert [line[:2] for line in lines] == [["lmtrain", "pretrain"]] * 2
    for words, (step, num) in zip(lines, [(6, 4), (9, 6)], strict=True):
        lmtrain(*words[1:])
        branch = tmp_path / f"trunk-decay-{step}"
        rates = {number: row[2] for number, row in steps(branch).items()}
        assert rates == {step + 1 + n: pytest.approx(3e-3 * (1 - (n / num) ** 0.5)) for n in range(num)}


def test_a_branch_from_before_a_later_start_changed_the_rate(other: Path, trunk: Path, tmp_path: Path) -> None:
    later = ["train.steps=15", "schedule=linear", "schedule.warmup_steps=0", "optim.lr=1e-3", "optim.clip_norm=2"]
    lmtrain("pretrain", "--from-run", trunk, *later)
    words = shlex.split(lmtrain("branch", trunk, "--at", 6, "--decay-steps", 2))
    assert {"stages.decay.optim.lr=0.003", "stages.decay.optim.clip_norm=1.0"} <= {*words}
    lmtrain(*words[1:])
    rates = {number: row[2] for number, row in steps(tmp_path / "trunk-decay-6").items()}
    assert rates == {7: pytest.approx(3e-3), 8: pytest.approx(1.5e-3)}
    branch = ["--from-run", checkpoint(trunk, 6), f"run.dir={tmp_path / 'branch'}", f"data.path={other}"]
    lmtrain("pretrain", *branch, "train.steps=9")
    shutil.rmtree(checkpoint(trunk, 6))
    lmtrain("pretrain", *branch, "train.steps=10")
    assert [*steps(tmp_path / "branch")] == [7, 8, 9, 10]


def test_refusals_of_branch(trunk: Path) -> None:
    told = lmtrain("branch", trunk, "--at", "3,5", code=66)
    assert "has no checkpoint of step 5. Those there are: 3, 6, 9" in told
    assert "Use --decay-steps 2000." in lmtrain("branch", trunk, "--at", "3", "--decay", "2k", code=2)
    assert "one length, above 0" in lmtrain("branch", trunk, "--at", "3", "--decay", "5%", "--decay-steps", 2, code=2)
    assert "--output FOLDER chooses" in lmtrain("branch", trunk, "--at", "3", "run.dir=x", code=2)
    assert "names no step" in lmtrain("branch", trunk, code=2)
    told = lmtrain("branch", trunk, "--at", "3", "data=dataset", f"data.valid_paths=[{trunk}]", code=2)
    assert f"stages.decay.data.valid_paths={{trunk: {trunk}}}" in told
    told = lmtrain("branch", trunk, "--at", "3", "model=gpt2_small", code=2)
    assert "model=gpt2_small changes model.seq_len for the whole run" in told
    told = lmtrain("branch", trunk, "--at", "3", "--slurm=--gpus-per-node 1 --array", code=2)
    assert "--slurm takes no array" in told
    told = lmtrain("branch", trunk, "--at", "3", f"data.path={trunk}", code=2)
    assert "it is for: stages.decay.data.path=" in told


def test_a_decay_is_an_array_of_jobs(trunk: Path, tmp_path: Path) -> None:
    script = lmtrain("branch", trunk, "--at", "6,9", "--slurm=--tasks-per-node 1 --time 1:00:00")
    assert "#SBATCH --array=0-1" in script
    assert f"--from-run={checkpoint(trunk, 9)}" in script
    assert f"run={tmp_path / 'trunk-decay-9'}" in script


def test_a_trunk_that_trains_on_will_remove_what_is_branched_from(trunk: Path) -> None:
    assert "warning" not in lmtrain("branch", trunk, "--at", "6")
    (trunk / "stop.json").unlink()
    told = lmtrain("branch", trunk, "--at", "6,9")
    assert "it will remove those of steps 6, 9" in " ".join(told.split())
    assert "checkpoint.keep_every_steps" in told


def test_trunk_and_branches_stand_on_one_axis(other: Path, trunk: Path, tmp_path: Path) -> None:
    """A branch begins at its parent's tokens, in the report and in the list of runs."""
    branch, page = tmp_path / "branch", tmp_path / "page.html"
    lmtrain("pretrain", "--from-run", checkpoint(trunk, 6), f"run.dir={branch}", f"data.path={other}")
    lmtrain("report", trunk, branch, "--output", page)
    text = page.read_text("utf-8")
    figures = json.loads(re.findall(r'<script type="application/json" id="figures">(.*?)</script>', text)[0])
    assert figures["axes"][0] == "tokens"
    (loss,) = [figure for figure in figures["figures"] if figure["key"] == "loss"]
    assert [curve["tokens"][0] for curve in loss["curves"]] == [4 * 32, 7 * 4 * 32]
    (mark,) = [mark for mark in figures["marks"] if mark[1] == "branch"]
    assert mark[:5] == [1, "branch", 6, 6 * 4 * 32, 0]
    assert f"{trunk} at step 6" in text
    rows = json.loads(lmtrain("runs", "--tree", tmp_path, "--json"))
    assert [(row["name"], row["depth"], row["branch_step"]) for row in rows] == [("trunk", 0, None), ("branch", 1, 6)]
