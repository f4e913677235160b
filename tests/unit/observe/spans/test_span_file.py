from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lmtrain.errors import OutputError, StorageError
from lmtrain.observe.spans.span_file import HEADER_BYTES, MAX_NAMES, SPAN, Kind, read_spans
from tests.unit.observe.spans.conftest import Open

VALUES = (10, 20, 0, 1, 0, -1, -1, -1, 0, Kind.OTHER, 0, 0)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_is_written_can_be_read_at_once_and_takes_no_more_room_when_it_is_closed(open_file: Open) -> None:
    file = open_file(1000)
    for _ in range(3):
        file.write(*VALUES)
    assert len(read_spans(file.path).spans) == 3
    file.close()
    assert len(read_spans(file.path).spans) == 3
    assert file.path.stat().st_size == HEADER_BYTES + 3 * SPAN.itemsize


def test_room_is_taken_as_it_is_needed_and_the_ring_goes_round(open_file: Open) -> None:
    file = open_file(10_000)
    blocks = os.stat(file.path).st_blocks
    for _ in range(10_001):
        file.write(*VALUES)
    assert os.stat(file.path).st_blocks > blocks
    assert len(read_spans(file.path).spans) == 9_999


def test_names_are_kept_once_and_a_header_has_room_for_some(open_file: Open) -> None:
    file = open_file(10)
    numbers = [file.name_index(f"name {i}") for i in range(MAX_NAMES + 1)]
    assert numbers == [*range(1, MAX_NAMES), 0, 0]
    assert file.name_index("name 3") == 4
    assert read_spans(file.path).header.names[:3] == ("", "name 0", "name 1")
    assert open_file(10).name_index("x" * 100) == 1


def test_a_disk_without_room_leaves_no_file(open_file: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="disk is full"):
        open_file(10)
    assert list((tmp_path / "trace").iterdir()) == []


def test_a_disk_that_fills_leaves_what_was_written(open_file: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    file = open_file(10_000)
    for _ in range(4096):
        file.write(*VALUES)
    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(3):
        file.write(*VALUES)
    assert file.problem is not None
    assert str(file.path) in file.problem
    assert len(read_spans(file.path).spans) == 4096


def test_nothing_is_overwritten(open_file: Open, tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "0.spans").write_text("another start's")
    with pytest.raises((StorageError, OutputError), match="exists"):
        open_file(10)
    assert (tmp_path / "trace" / "0.spans").read_text() == "another start's"
