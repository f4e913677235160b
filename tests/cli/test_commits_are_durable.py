"""What gets its final name is on the disk before, and its name after: recorded by what the commands ask of the system.

A power cut then leaves the old output or the new one. Each file is compared, as it is renamed, with what it was when it
was last synced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmtrain.runtime.files import atomic_files
from tests.cli.harness import Toy, lmtrain


class Journal:
    """A record of the files renamed before they were synced, and of the names that no sync has put on the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: dict[tuple[int, int], tuple[int, int]] = {}  # inode -> its size and time at its last sync
        self.too_early: list[str] = []
        self.renamed: dict[tuple[int, int], str] = {}  # folder -> a name in it that is not synced yet
        self.count = 0
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._recorded(getattr(os, name)))
        monkeypatch.setattr(atomic_files, "exchange", self._recorded(atomic_files.exchange))
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._noted(getattr(os, name)))

    def _noted(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def noted(fd: int) -> None:
            sync(fd)
            status = os.fstat(fd)
            self.synced[_inode(status)] = (status.st_size, status.st_mtime_ns)
            self.renamed.pop(_inode(status), None)

        return noted

    def _recorded(self, rename: Any) -> Any:
        def recorded(*names: Any, **options: Any) -> Any:
            target = Path(names[1])
            result = rename(*names, **options)
            # because: an unfinished output's journal is compared with it when it is read, and otherwise begun anew
            if target.name != "journal.jsonl":
                # after an exchange the old output has the other name
                self.too_early += [f"{path}" for path in _everything(target) if not self._is_synced(path)]
                self.renamed[_inode(os.stat(target.parent))] = str(target)
            self.count += 1
            return result

        return recorded

    def _is_synced(self, path: Path) -> bool:
        status = os.stat(path)
        return self.synced.get(_inode(status)) == (status.st_size, status.st_mtime_ns)


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _everything(path: Path) -> Iterator[Path]:
    yield path
    yield from path.rglob("*")


@pytest.mark.wide
def test_every_output_is_synced_before_it_has_its_name(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, run = Journal(monkeypatch), tmp_path / "run"
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
        before = journal.count
        lmtrain(*words)
        assert (journal.too_early, journal.renamed) == ([], {}), words
        assert journal.count > before, words
