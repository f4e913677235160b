"""The best checkpoint of a run stays, whatever is killed when, and RUN@best is it; domains have losses of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import read_metrics
from lmtrain.runfolder.file_names import step_folder_name
from tests.cli.harness import Toy, lmtrain, start
from tests.cli.test_parallel_runs import run

# a learning rate that rises far beyond what can be learned with: the best checkpoint is an early one on any machine
SETTINGS: dict[str, object] = {
    "train__steps": 16, "schedule__warmup_steps": 15, "optim__lr": 3, "train__valid_interval_steps": 2,
    "train__valid_samples": 4, "checkpoint__interval_steps": 2, "checkpoint__keep_last": 1, "checkpoint__keep_best": 1,
}  # fmt: skip
KILLS = [
    "ckpt.prune:count=1", "ckpt.prune:count=3", "ckpt.after_rename:count=4", "ckpt.before_rename:count=5",
    "step:count=9",
]  # fmt: skip


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "valid"}


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def unbroken(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("best") / "run"
    lmtrain("pretrain", *toy.settings(folder, **SETTINGS))
    return folder


@pytest.mark.wide
def test_the_best_and_the_newest_stay(unbroken: Path, toy: Toy, tmp_path: Path) -> None:
    found = losses(unbroken)
    best = min(found, key=lambda step: (found[step], step))
    assert best < 14, "else this proves nothing"
    assert kept(unbroken) == [step_folder_name(step) for step in (best, 16)]
    said = f"best checkpoint {step_folder_name(best)}, by loss/valid {found[best]:.4f}; {unbroken}@best names it"
    assert said in lmtrain("inspect", unbroken)
    assert f"step            {best}" in lmtrain("inspect", f"{unbroken}@best")
    words = ["--task", "perplexity", "--data", toy.text / "page_001.txt", "--json"]
    there = lmtrain("eval", f"{unbroken}@best", *words)
    assert f'"step": {best}' in there
    begun = toy.settings(tmp_path / "new", train__steps=1, schedule__warmup_steps=0)
    said = lmtrain("pretrain", *begun, f"checkpoint.init_from={unbroken}@best")
    assert f"with the weights of {unbroken}/checkpoints/{step_folder_name(best)}" in said


@pytest.mark.wide
@pytest.mark.parametrize("kill", KILLS)
def test_a_run_that_was_killed_knows_the_best_again(toy: Toy, tmp_path: Path, unbroken: Path, kill: str) -> None:
    fault = {"LMTRAIN_FAULT": f"kill:point={kill}", "LMTRAIN_ALLOW_FAULTS": "1"}
    process = start("pretrain", *toy.settings(tmp_path / "run", **SETTINGS), env=fault)
    process.communicate(timeout=300)
    assert process.returncode == -9
    lmtrain("pretrain", *toy.settings(tmp_path / "run", **SETTINGS))
    assert losses(tmp_path / "run") == losses(unbroken)
    assert kept(tmp_path / "run") == kept(unbroken)


@pytest.mark.wide
def test_the_best_by_a_task_that_is_known_in_no_settings_class(toy: Toy, tmp_path: Path) -> None:
    words = [f"eval.tasks=[{{task: perplexity, data: {toy.text / 'page_001.txt'}, name: code}}]"]
    words += ["eval.interval_steps=4", "checkpoint.best_by=eval/code/token_accuracy"]
    lmtrain("pretrain", *toy.settings(tmp_path / "run", **SETTINGS), *words)
    rows = [row for row in read_metrics(tmp_path / "run/metrics.jsonl") if row["event"] == "eval"]
    best = max(rows, key=lambda row: (row["measures"]["token_accuracy"], -row["step"]))["step"]
    assert step_folder_name(best) in kept(tmp_path / "run")
    wrong = [*words[:2], "checkpoint.best_by=eval/code/token_acuracy"]
    said = lmtrain("pretrain", *toy.settings(tmp_path / "new", **SETTINGS), *wrong, "--dry-run", code=2)
    assert "is not a measure of this run's evaluations. Did you mean eval/code/token_accuracy?" in said


@pytest.mark.wide
@pytest.mark.parametrize("nproc", [1, 4])
def test_a_domain_has_the_loss_that_it_has_alone(toy: Toy, tmp_path: Path, nproc: int) -> None:
    """The weights are those of the same training, so each of three runs sees one model."""
    lmtrain("preprocess", toy.text / "page_002.txt", "--tokenizer", toy.tokenizer, "--output", tmp_path / "small")
    layout = ["parallel.dp_shard=2", "parallel.pp=2", "train.micro_batch=1"] if nproc > 1 else []
    paths: dict[str, Path] = {"many": toy.data, "few": tmp_path / "small"}
    common: dict[str, Any] = {"train__steps": 2, "train__valid_interval_steps": 2, "train__valid_samples": 7}
    common |= {"schedule__warmup_steps": 0}
    for name, words in {
        **{name: [f"data.valid_path={path}"] for name, path in paths.items()},
        "both": [f"data.valid_paths={{many: {paths['many']}, few: {paths['few']}}}"],
    }.items():
        run(nproc, *toy.settings(tmp_path / name, **common), *layout, *words)
    (both,) = [row for row in read_metrics(tmp_path / "both/metrics.jsonl") if row["event"] == "valid"]
    keys = ("loss", "ppl", "accuracy", "samples", "tokens")
    for name in paths:
        (alone,) = [row for row in read_metrics(tmp_path / name / "metrics.jsonl") if row["event"] == "valid"]
        assert {key: alone[key] for key in keys} == both["domains"][name]
    each = both["domains"].values()
    assert both["tokens"] == sum(one["tokens"] for one in each)
    assert both["loss"] == pytest.approx(sum(one["loss"] * one["tokens"] for one in each) / both["tokens"], rel=1e-12)
