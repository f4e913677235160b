"""What an interrupted reshard had on disk, so that the same command goes on from there. Torch-free.

One line a finished segment: its number, and the digests of the blocks that became whole with it. A line is written
once its data is on disk; a torn last line is a segment that is done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmtrain.errors import DataError, MissingInputError
from lmtrain.runtime.files import parse_json, read_bytes

MAX_JOURNAL_BYTES = 1 << 30
Done = dict[int, dict[str, dict[int, bytes]]]  # segment -> file -> block -> digest


class Journal:
    def __init__(self, path: Path, key: str) -> None:
        """`key` names the work; the journal of other work is not read."""
        self.path, self._first = path, {"format": "lmtrain reshard journal", "version": 1, "key": key}

    def read(self) -> Done | None:
        """The segments that are on disk; None where nothing of this work is there."""
        try:
            lines = read_bytes(self.path, MAX_JOURNAL_BYTES, follow_links=False).split(b"\n")
            values = [parse_json(line, self.path) for line in lines[:-1]]  # because: what ends in no newline is torn
            if not values or values[0] != self._first:
                return None
            return {_segment(value): _digests(value) for value in values[1:]}
        except (DataError, MissingInputError, KeyError, TypeError, ValueError, AttributeError):
            return None

    def begin(self) -> None:
        self._write(self._first, os.O_TRUNC)

    def trim(self) -> None:
        """Cut a torn line off, so that the next one begins at a line's beginning."""
        whole = self.path.read_bytes().rpartition(b"\n")[0]
        os.truncate(self.path, len(whole) + 1)

    def add(self, segment: int, digests: Mapping[str, Mapping[int, bytes]]) -> None:
        blocks = {file: {str(index): d.hex() for index, d in found.items()} for file, found in digests.items()}
        self._write({"segment": segment, "digests": blocks}, os.O_APPEND)

    def _write(self, value: dict[str, Any], mode: int) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | mode, 0o666)
        try:
            os.write(fd, json.dumps(value, separators=(",", ":")).encode() + b"\n")
        finally:
            os.close(fd)


def _segment(value: dict[str, Any]) -> int:
    if not isinstance(value["segment"], int):
        raise ValueError("a segment is a number")
    return value["segment"]


def _digests(value: dict[str, Any]) -> dict[str, dict[int, bytes]]:
    return {
        file: {int(index): bytes.fromhex(digest) for index, digest in found.items()}
        for file, found in value["digests"].items()
    }
