"""Settings that could only hang or fill the memory are refused at once, and large ones that could work are shown."""

from __future__ import annotations

import time

import pytest

from tests.cli.harness import Preset, Toy, lmtrain

NINES = "9" * 5000


def _said(toy: Toy, words: str, code: int, seconds: float) -> str:
    small = [word for word in toy.settings(toy.data.parent / "run") if not word.startswith("train.steps")]
    began = time.process_time()
    said = lmtrain("pretrain", *small, Preset("train.steps=1000"), *words.split(), "--dry-run", code=code)
    assert time.process_time() - began < seconds
    return said


def test_sizes_are_refused_before_anything_is_counted(toy: Toy) -> None:
    words = "train.global_batch=1e15 model.num_layers=1000000000 parallel.dp_shard=1e9 compute.threads=1e9"
    said = _said(toy, f"{words} parallel.timeout_s=1e308 model.vocab_multiple=1e18", 2, 2)
    for part in (
        "train.global_batch=1000000000000000 must be at most 16777216", "num_layers=1000000000 must be at most 4096",
        "parallel.dp_shard=1000000000 makes 1000000000 processes; at most 131072 are allowed",
        "compute.threads=1000000000 must be at most 1024", "parallel.timeout_s=1e+308 must be at most 10000000",
        "model.vocab_multiple=1000000000000000000 must be at most 65536",
    ):  # fmt: skip
        assert part in said


@pytest.mark.wide
@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("optim=null", 2, "optim is not set. Choose one with optim=NAME"),
        (f"optim.lr={NINES}", 2, "which has 5000 digits"), (f"train.seed=1{'_0' * 2000}", 2, "digits"),
        ("train.steps=1e5000", 2, "train.steps=inf is not a whole number"),
        ("train.steps=1e308T", 2, "train.steps=1e308T is too large for a number"),
        (f"run.dir={'x' * 300}", 2, "its longest name 300"), (f"run.dir={'x/' * 2500}", 2, "has 5000 bytes"),
        ("run.dir=a\udcffb", 2, "run.dir holds half a character (U+DCFF)"),
        ("run.dir='a\0b'", 2, "zero byte"), ("run.dir=/dev/null", 73, "/dev/null is a file"),
    ],
    ids=lambda given: f"{given!a:.40}",
)  # fmt: skip
def test_values_that_are_none(toy: Toy, words: str, code: int, part: str) -> None:
    said = _said(toy, words, code, 2)
    assert part in said
    assert len(said) < 2000


@pytest.mark.wide
@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("model.width=1000000000000 model.num_heads=1", 2, "parameters; at most 1e+15 are allowed"),
        ("model.vocab_size=1000000000000000000", 2, "parameters; at most 1e+15 are allowed"),
        ("parallel.pp=1000000000", 2, "makes 1000000000 processes"), ("parallel.pp=1000", 78, "Use parallel.pp=2 or"),
        ("parallel.tp=100000", 78, "does not divide model.num_heads=2"),
        ("train.micro_batch=1000000000000", 2, "Use 1, 2 or 4"), ("model.num_heads=1000000000000", 2, "not divide"),
        ("parallel.pp=2 train.global_batch=131072", 2, "makes 65536 microbatches x 2 stages in a step; the product"),
        ("parallel.pp=2 parallel.vp=2 parallel.schedule=zb_v model.num_layers=4 train.global_batch=1048576", 2, "4 st"),
        ("train.rampup={start:2,increment:2,samples:9} train.global_batch=16000000", 2, "increments"),
        ("optim=muon optim.newton_schulz_rounds=1000000000", 2, "must be at most 100"),
        ("schedule.warmup_steps=1e18", 2, "must be less than"), ("train.steps=1000000000000", 0, "run folder"),
        ("train.tokens=100000000000000000 train.steps=null", 0, "run folder"),
        ("train.rampup={start:2,increment:2,samples:1000000000} train.global_batch=20000", 0, "run folder"),
        ("train.valid_samples=1e18 checkpoint.keep_last=1e18 observe.log_interval_steps=1e18", 0, "run folder"),
        ("model.num_layers=4096 checkpoint.interval_steps=null", 0, "run folder"),
        ("model.num_layers=2048 parallel.pp=2048 checkpoint.interval_steps=null", 0, "2048 stages"),
        ("parallel.dp_shard=32768 train.global_batch=65536", 0, "run folder"),
        ("parallel.pp=2 train.global_batch=65536", 0, "pipeline"),
    ],
    ids=lambda given: f"{given!a:.60}",
)  # fmt: skip
def test_large_settings_are_refused_or_shown(toy: Toy, words: str, code: int, part: str) -> None:
    assert part in _said(toy, words, code, 10)
