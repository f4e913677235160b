"""Limits are called what they are; those that can be reached here are."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from lmtrain.errors import StorageError
from lmtrain.runtime.files.atomic_files import atomic_file, read_bytes, storage_errors
from lmtrain.runtime.files.explain_os_errors import limit_reached
from tests.limited import limited


def test_a_file_that_may_not_grow_names_the_limit(tmp_path: Path) -> None:
    with (
        limited(resource.RLIMIT_FSIZE, 4096),
        pytest.raises(StorageError, match=r"out failed: a file may have 4\.0 KiB here\. Raise that limit"),
        atomic_file(tmp_path / "out") as file,
    ):
        file.write(bytes(5000))
    assert list(tmp_path.iterdir()) == []


def test_too_many_open_files_are_no_fault_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"x")
    highest = max(map(int, os.listdir("/proc/self/fd")))
    held = [os.dup(0) for _ in range(3)]
    try:
        with (
            limited(resource.RLIMIT_NOFILE, 3),
            pytest.raises(StorageError, match=r"Reading .*in failed: too many open files, .* may have 3\. Raise"),
        ):
            read_bytes(tmp_path / "in", 10)
    finally:
        for fd in held:
            os.close(fd)
    assert max(map(int, os.listdir("/proc/self/fd"))) <= highest + 1


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, r"(the disk is full|its disk has no inodes left for another file) \(.* free\)"),
        (errno.EDQUOT, r"quota .* is used up"),
        (errno.EFBIG, r"takes no file that large"),
        (errno.ENFILE, r"on the whole machine"),
    ],
)
def test_a_limit_is_said_with_a_way_out(tmp_path: Path, number: int, said: str) -> None:
    path = tmp_path / "not" / "there" / "yet"
    whole = rf"Saving .*/yet failed: .*{said}.*\. [A-Z].*\.$"
    with pytest.raises(StorageError, match=whole), storage_errors(path, "Saving"):
        raise OSError(number, os.strerror(number))


def test_a_refusal_that_is_no_limit_is_left_to_others(tmp_path: Path) -> None:
    assert limit_reached(OSError(errno.EIO, "Input/output error"), tmp_path) is None
