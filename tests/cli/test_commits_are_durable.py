"""What commands leave is on the disk when they end, and gets its name in the order that a power cut asks for."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.harness import Toy, lmtrain
from tests.disk_record import DiskRecord

# because: a run does not wait for the disk at each step; a power cut takes the last rows, and the next start a torn one
GROWING = ("metrics.jsonl", "log.txt")


@pytest.mark.wide
def test_every_output_is_on_the_disk_before_and_after_it_has_its_name(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    commands: list[list[object]] = [
        ["tokenizer", "train", toy.text, "--output", tmp_path / "tokenizer", "--vocab-size", "300"],
        ["preprocess", toy.text, "--tokenizer", toy.tokenizer, "--output", tmp_path / "data", "--workers", "1"],
        ["pretrain", *toy.settings(run, train__steps=4, checkpoint__interval_steps=2)],
        ["reshard", run, "--output", tmp_path / "sharded", "--to", "tp=2", "--workers", "1"],
        ["merge", "--of", run, "--last", "2", "--output", tmp_path / "merged", "--workers", "1"],
        ["export", run, "--output", tmp_path / "hf", "--to", "hf"],
        ["import", tmp_path / "hf", "--output", tmp_path / "imported"],
        ["corpus", "sample", toy.text, "--count", "20", "--output", tmp_path / "sample.jsonl"],
        ["data", "merge", tmp_path / "data", tmp_path / "data", "--output", tmp_path / "twice"],
    ]
    for words in commands:
        with monkeypatch.context() as patch, closing(DiskRecord(patch, tmp_path)) as disk:
            lmtrain(*words)
            assert disk.problems(*GROWING) == [], words
            assert disk.callers, words
