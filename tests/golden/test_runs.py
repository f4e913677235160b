"""Runs of every release are whole, and go on, with what the release found: a folder of `releases/` for each of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import lmtrain

RELEASES = Path(__file__).parent / "releases"
SETTINGS = (
    "data.path=data", "run.dir=run", "train.global_batch=2", "train.micro_batch=1", "train.valid_interval_steps=0",
    "model.seq_len=16", "model.num_layers=1", "model.width=8", "model.num_heads=1", "model.vocab_multiple=8",
    "model.dropout=0.1", "compute.threads=1", "observe.tensorboard=false", "schedule=constant",
    "schedule.warmup_steps=1", "checkpoint.interval_steps=4",
)  # fmt: skip
# what the release itself printed of step 6, two steps after the checkpoint that is kept
STEP_6 = {"0.1.0": (5.631554841995239, 0.9632291197776794, "d8b140")}


@pytest.mark.wide
@pytest.mark.parametrize("release", sorted(path.name for path in RELEASES.iterdir()))
def test_a_run_of_an_earlier_release_goes_on(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RELEASES / release, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    lmtrain("verify", "run")
    output = lmtrain("pretrain", *SETTINGS, "train.steps=6")
    assert "at step 4" in output
    row = next(row for row in read_metrics(Path("run/metrics.jsonl")) if row["event"] == "step" and row["step"] == 6)
    loss, norm, samples = STEP_6[release]
    assert (row["loss"], row["grad_norm"]) == pytest.approx((loss, norm), rel=1e-4)  # because: libraries may differ
    assert row["samples_hash"].startswith(samples)
