"""What a preprocess has done so far, on disk, so that a killed one goes on. Called by outputs.py.

One JSON object a line. The first names the work by a hash of the inputs and settings: other work starts over. Each
further line is written after a portion's output was given to the operating system, and says where reading goes on
and how far every file has come. Every line ends in a hash of itself and of the one before it. A kill can tear the last
line only; what else is damaged shows in the hashes, and everything from there on is done again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import IO, Any

from lmtrain.data.store.writer import open_own
from lmtrain.errors import LmtrainError
from lmtrain.runtime.files.files import parse_json, read_bytes, storage_errors
from lmtrain.runtime.processes.faults import fault_point

_HEAD = {"format": "lmtrain preprocess journal", "version": 2}
_SEAL = "sha256"
_MOST_BYTES = 16 << 30  # a line is some hundred bytes for each 4 MiB of source


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._seal = ""  # of the last line
        self.damaged = False  # whether a line that was found is not what was written

    def read(self, identity: str | None) -> list[dict[str, Any]] | None:
        """The lines of the same work, up to a damaged one; None where there is no journal, or that of other work."""
        try:
            lines = read_bytes(self._path, _MOST_BYTES, follow_links=False).split(b"\n")[:-1]
        except (OSError, LmtrainError):
            return None
        trees, seal = [], ""
        for line in lines:
            try:
                tree = parse_json(line, self._path)
                seal, found = _sealed(tree, seal), tree.pop(_SEAL)
            except (LmtrainError, AttributeError, KeyError, TypeError):
                found = None
            if found != seal:
                self.damaged = True
                break
            trees.append(tree)
        if not trees or identity is None or trees[0] != _HEAD | {"identity": identity}:
            return None
        return trees[1:]

    def start(self, identity: str | None, lines: list[dict[str, Any]]) -> None:
        """Begin anew with the lines that still hold."""
        with storage_errors(self._path, "Writing"):
            temporary = self._path.with_suffix(".new")
            trees: list[dict[str, Any]] = [_HEAD | {"identity": identity}, *lines]
            self._seal = ""
            with open_own(temporary, "wb") as file:
                for tree in trees:
                    file.write(self._line(tree))
            temporary.replace(self._path)
            self._file = open_own(self._path, "ab")

    def append(self, tree: dict[str, Any]) -> None:
        assert self._file is not None, "start comes first"
        with storage_errors(self._path, "Writing"):
            fault_point("data.journal")
            self._file.write(self._line(tree))
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _line(self, tree: dict[str, Any]) -> bytes:
        self._seal = _sealed(tree, self._seal)
        return json.dumps(tree | {_SEAL: self._seal}, separators=(",", ":")).encode() + b"\n"


def _sealed(tree: dict[str, Any], before: str) -> str:
    rest = {key: value for key, value in tree.items() if key != _SEAL}
    return hashlib.sha256((before + json.dumps(rest, sort_keys=True, separators=(",", ":"))).encode()).hexdigest()
