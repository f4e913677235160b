"""A file that is mostly a hole is refused before a terabyte of zeros is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmtrain.errors import DataError
from lmtrain.runtime.files.atomic_files import refuse_sparse_file


def test_a_file_of_which_most_was_never_written(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"1234" * 100_000)
    refuse_sparse_file(path)
    os.truncate(path, 1 << 29)
    refuse_sparse_file(path)  # small enough to be read
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match=r"is incomplete: only .* of its 1.0 TiB were written"):
        refuse_sparse_file(path)
    with open(path, "r+b") as file:
        file.seek(1 << 39)
        file.write(b"1")
    with pytest.raises(DataError, match="is incomplete"):
        refuse_sparse_file(path)
    path.write_bytes(b"")
    refuse_sparse_file(path)
