"""What a preprocess has done so far, on disk, so that a killed one goes on. Called by outputs.py.

One JSON object a line. The first names the work by a hash of the inputs and settings: other work starts over. Each
further line is written after a portion's output was given to the operating system, and says where reading goes on
and how far every file has come. A kill can tear the last line only; a power cut can do worse, which the hashes show.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from lmtrain.errors import LmtrainError
from lmtrain.runtime.faults import fault_point
from lmtrain.runtime.files import parse_json, storage_errors

_HEAD = {"format": "lmtrain preprocess journal", "version": 1}


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def read(self, identity: str | None) -> list[dict[str, Any]] | None:
        """The lines of the same work; None where there is no journal, or that of other work."""
        try:
            lines = self._path.read_bytes().split(b"\n")[:-1]
            trees = [parse_json(line, self._path) for line in lines]
        except (OSError, LmtrainError):
            return None
        if not trees or identity is None or trees[0] != _HEAD | {"identity": identity}:
            return None
        return trees[1:]

    def start(self, identity: str | None, lines: list[dict[str, Any]]) -> None:
        """Begin anew with the lines that still hold."""
        with storage_errors(self._path, "Writing"):
            temporary = self._path.with_suffix(".new")
            trees: list[dict[str, Any]] = [_HEAD | {"identity": identity}, *lines]
            temporary.write_bytes(b"".join(map(_line, trees)))
            temporary.replace(self._path)
            self._file = open(self._path, "ab")  # noqa: SIM115

    def append(self, tree: dict[str, Any]) -> None:
        assert self._file is not None, "start comes first"
        with storage_errors(self._path, "Writing"):
            fault_point("data.journal")
            self._file.write(_line(tree))
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _line(tree: dict[str, Any]) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode() + b"\n"
