"""What an interrupted reshard had on disk, so that the same command goes on from there. Torch-free.

One line a finished segment: the digests of the blocks that became whole with it. A line is written once its data is on
disk; a torn last line is a segment that is done again. Nobody believes a line before the block has that digest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmtrain.errors import DataError, LmtrainError
from lmtrain.runtime.files.files import open_regular, parse_json, read_errors

MAX_JOURNAL_BYTES = 1 << 30
_MAX_LINE_BYTES = 16 << 20
Done = dict[str, dict[int, bytes]]  # file -> block -> digest


class Journal:
    def __init__(self, path: Path, key: str) -> None:
        """`key` names the work; the journal of other work is not read."""
        self.path, self._first = path, {"format": "lmtrain reshard journal", "version": 2, "key": key}

    def read(self, num_blocks: Mapping[str, int]) -> Done | None:
        """The blocks that were on disk; None where this is no journal of this work, of files with so many blocks."""
        done: Done = {}
        try:
            lines = self._lines()
            if next(lines, None) != self._first:
                return None
            for line in lines:
                for file, found in line["blocks"].items():
                    for index, digest in found.items():
                        if not (index.isdecimal() and int(index) < num_blocks[file] and len(digest) == 64):
                            return None
                        done.setdefault(file, {})[int(index)] = bytes.fromhex(digest)
        except (LmtrainError, KeyError, TypeError, ValueError, AttributeError):
            return None
        return done

    def _lines(self) -> Iterator[Any]:
        with read_errors(self.path):
            fd, size = open_regular(self.path, follow_links=False)
            with open(fd, "rb") as file:
                if size > MAX_JOURNAL_BYTES:
                    raise DataError(f"{self.path} is larger than any journal.")
                while (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):  # because: what ends in none is torn
                    yield parse_json(line, self.path)

    def begin(self) -> None:
        self._write(self._first, os.O_TRUNC)

    def trim(self) -> None:
        """Cut a torn line off, so that the next one begins at a line's beginning."""
        with open(self.path, "r+b") as file:
            whole = sum(len(line) for line in file if line.endswith(b"\n"))
            file.truncate(whole)

    def add(self, digests: Mapping[str, Mapping[int, bytes]]) -> None:
        blocks = {file: {str(index): d.hex() for index, d in found.items()} for file, found in digests.items()}
        self._write({"blocks": blocks}, os.O_APPEND)

    def _write(self, value: dict[str, Any], mode: int) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | mode, 0o666)
        with open(fd, "wb") as file:
            file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
