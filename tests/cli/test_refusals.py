"""Wrong settings are refused before anything starts, all at once, with the key, the rule and a way out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.harness import Toy, lmtrain


def test_a_misspelt_key_is_named_with_the_nearest(toy: Toy, tmp_path: Path) -> None:
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run"), "optim.lrr=1", code=2)
    assert "optim.lrr=1 is no setting. Did you mean lr?" in output
    assert not (tmp_path / "run").exists()


def test_every_problem_is_reported_at_once(toy: Toy, tmp_path: Path) -> None:
    output = lmtrain(
        "pretrain", *toy.settings(tmp_path / "run"), "model.num_heads=5", "train.micro_batch=3", "optim.lr=-1",
        "precision=fp16", "precision.min_scale=0", "compute.device=tpu", code=2,
    )  # fmt: skip
    for words in ("model.num_heads=5", "optim.lr=-1", "precision.min_scale=0", "compute.device=tpu",
                  "train.micro_batch=3"):  # fmt: skip
        assert words in output


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model=gtp2_small", "Did you mean gpt2_small?"),
        ("train.micro_batch=3", "train.micro_batch=3 x 1 data-parallel copies does not divide train.global_batch=4"),
        ("parallel.tp=2", "parallel.tp=2 asks for several processes"),
        ("train.steps=null", "Set train.steps=1000 or train.tokens=300B."),
        ("train.tokens=1B", "must be given one without the other"),
        ("schedule.warmup_steps=100", "schedule.warmup_steps=100"),
        ("train.steps=soon", "train.steps=soon is not a size"),
        ("optim.kind=sgd", "optim.kind=sgd is no kind"),
        ("run.dir=''", "run.dir= is empty"),
        ("optim.lr=1,2", "Add -m to run each of them."),
        ("data.path=${oc.env:HOME}", "calls a resolver"),
        ("+optim._target_=os.system", "names code"),
        ("model.vocab_size=10", "smaller than the tokenizer's"),
        ("data.split=[1,0,0]", ""),
        ("=3", "is not an override"),
    ],
)
def test_refused_with_a_way_out(toy: Toy, tmp_path: Path, override: str, words: str) -> None:
    code = 0 if override.startswith("data.split") else 2
    extra = ["--dry-run"] if code == 0 else []
    assert words in lmtrain("pretrain", *toy.settings(tmp_path / "run"), override, *extra, code=code)
    assert not (tmp_path / "run").exists()


def test_a_missing_dataset(toy: Toy, tmp_path: Path) -> None:
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run", data__path=tmp_path / "none"), code=66)
    assert str(tmp_path / "none") in output
    assert not (tmp_path / "run").exists()


def test_several_processes_are_refused(toy: Toy, tmp_path: Path) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert "2 processes" in lmtrain("pretrain", *toy.settings(tmp_path / "run"), code=78, env=env)


def test_too_little_text_for_a_sample(toy: Toy, tmp_path: Path) -> None:
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run", model__seq_len=1_000_000), code=65)
    assert "too few tokens" in output or "0 samples" in output


def test_errors_show_no_traceback_unless_asked(toy: Toy, tmp_path: Path) -> None:
    wrong = [*toy.settings(tmp_path / "run"), "optim.lrr=1"]
    assert "Traceback" not in lmtrain("pretrain", *wrong, code=2)
    assert "Traceback" in lmtrain("pretrain", *wrong, "--debug", code=1)


def test_refusals_and_help_do_not_import_torch(toy: Toy, tmp_path: Path) -> None:
    """The reason why they take a fraction of a second."""
    import os
    import subprocess

    for arguments in (["--help"], ["pretrain", "--help"], ["pretrain", *toy.settings(tmp_path / "run"), "optim.lrr=1"],
                      ["pretrain", *toy.settings(tmp_path / "run"), "--dry-run"]):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "lmtrain.cli.main", *arguments],
            capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "import time:" in line}
        assert "typer" in imported
        assert "torch" not in imported


def test_print_config_composes_back(toy: Toy, tmp_path: Path) -> None:
    printed = lmtrain("pretrain", *toy.settings(tmp_path / "run"), "--print-config")
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "mine.yaml").write_text(printed)
    again = lmtrain("pretrain", "--config-dir", folder, "--config-name", "mine", "--print-config")
    assert again == printed


def test_a_users_group_wins_over_ours(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "adamw.yaml").write_text("kind: adamw\nlr: 0.123\n")
    settings = [s for s in toy.settings(tmp_path / "run") if not s.startswith("optim.lr")]
    printed = json.loads(lmtrain("pretrain", "--config-dir", tmp_path, *settings, "--print-config", "--json"))
    assert printed["optim"]["lr"] == 0.123
