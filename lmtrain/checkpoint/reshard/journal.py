"""The journal of an interrupted reshard or merge: which hash blocks of the new files are on disk. Torch-free.

Called by the attempt, which keeps it in its work folder and goes on from it after a kill.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmtrain.errors import DataError, LmtrainError
from lmtrain.runtime.files.atomic_files import open_regular, parse_json, read_errors

MAX_JOURNAL_BYTES = 1 << 30
_MAX_LINE_BYTES = 16 << 20
DoneBlocks = dict[str, dict[int, bytes]]  # file name -> index of a hash block -> its digest


class Journal:
    """The file in which an attempt records the hash blocks that it has written."""
    def __init__(self, path: Path, key: str) -> None:
        """`key` identifies the work (see `work_key`); the journal of other work is not read."""
        self.path, self._first = path, {"format": "lmtrain journal of a checkpoint", "version": 2, "key": key}

    def read(self, num_blocks: Mapping[str, int]) -> DoneBlocks | None:
        """Return the digests of the hash blocks (4 MiB of a new file) that the journal lists as written to disk, by
        file and block index. Return None if the journal is damaged or was begun for another job. `num_blocks` is the
        number of blocks that each file has.
        """
        done: DoneBlocks = {}
        try:
            lines = self._lines()
            if next(lines, None) != self._first:
                return None
            for line in lines:
                for file, digests in line["blocks"].items():
                    for index, digest in digests.items():
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
                    raise DataError(f"The journal {self.path} is larger than {MAX_JOURNAL_BYTES} bytes.")
                # because: a line without a newline at its end was interrupted
                while (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
                    yield parse_json(line, self.path)

    def begin(self) -> None:
        """Start a new journal with its first line."""
        self._write(self._first, os.O_TRUNC)

    def trim(self) -> None:
        """Remove an incomplete last line, so that the next entry starts a new line."""
        with open(self.path, "r+b") as file:
            file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))

    def add(self, digests: Mapping[str, Mapping[int, bytes]]) -> None:
        """Append a line with hash blocks that are on disk: their digests by file and block index."""
        blocks = {file: {str(index): d.hex() for index, d in by_index.items()} for file, by_index in digests.items()}
        self._write({"blocks": blocks}, os.O_APPEND)

    def _write(self, value: dict[str, Any], mode: int) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | mode, 0o666)
        with open(fd, "wb") as file:
            file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
