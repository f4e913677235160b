"""The newest rows of a metrics file and then each that is added: what a second terminal needs. Called by `watch`.

A file may grow, be cut back by a run that goes on, or not be there yet; what is torn or damaged tells nothing.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmtrain.observe.metrics import read_value

_TAIL_BYTES = 4 << 20  # because: ten thousand rows show where a run is, and are read in a blink


class Followed:
    """`rows()` gives what has come since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, -1

    def rows(self) -> list[dict[str, Any]]:
        with suppress(OSError), open(self._path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if self._at < 0 or size < self._at:
                self._at = self._begin(file, size)
            file.seek(self._at)
            whole, _, _ = file.read(size - self._at).rpartition(b"\n")
            self._at += len(whole) + bool(whole)
            return [row for line in whole.split(b"\n") if (row := _row(line)) is not None]
        return []

    def _begin(self, file: Any, size: int) -> int:
        """Where the first whole line of the newest bytes stands."""
        if size <= _TAIL_BYTES:
            return 0
        file.seek(size - _TAIL_BYTES)
        return size - _TAIL_BYTES + len(file.readline())


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("event"), str) or not isinstance(row.get("step"), int):
        return None
    return {key: read_value(value) for key, value in row.items()}
