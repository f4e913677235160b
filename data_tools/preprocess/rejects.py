"""What happens to bad lines: stop, skip or quarantine, counted by cause. Called by pipeline.py, in the input's order.

The rejects file has one JSON object a line: file, line (or row), byte, cause, and in quarantine the line itself.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Any

from data_tools.read.documents import Bad
from lmtrain.errors import DataError
from lmtrain.runtime.files import read_errors

_READ_BYTES = 1 << 20


class OnError(StrEnum):
    STOP = "stop"
    SKIP = "skip"
    QUARANTINE = "quarantine"


class LineCounter:
    """Which line a byte of a plain file is in. Most files have no bad line and need no count."""

    def __init__(self) -> None:
        self._path, self._at, self._num_ends = Path(), 0, 0

    def before(self, path: Path, start: int) -> int:
        """How many lines begin before a byte; asked for with growing bytes of one file after the other."""
        if start == 0:
            return 0
        if path != self._path or start - 1 < self._at:
            self._path, self._at, self._num_ends = path, 0, 0
        with read_errors(path), open(path, "rb") as file:
            file.seek(self._at)
            while self._at < start - 1 and (data := file.read(min(start - 1 - self._at, _READ_BYTES))):
                self._num_ends += data.count(b"\n")
                self._at += len(data)
        return self._num_ends + 1


def where(path: Path, kind: str, line: int, bad: Bad) -> str:
    if kind == "parquet":
        return f"{path}, row {line}"
    return f"{path}:{line} (byte {bad.offset})"


def record(path: Path, kind: str, line: int, bad: Bad) -> bytes:
    """One line of the rejects file."""
    tree: dict[str, Any] = {"file": str(path)}
    tree |= {"row": line} if kind == "parquet" else {"line": line, "byte": bad.offset}
    tree["cause"] = bad.cause
    if bad.content is not None:
        try:
            tree["content"] = bad.content.decode()
        except UnicodeDecodeError:
            tree["content_base64"] = base64.b64encode(bad.content).decode()
    return json.dumps(tree, ensure_ascii=False).encode() + b"\n"


def check(policy: OnError, max_bad: int | None, counts: Counter[str], place: str, bad: Bad) -> None:
    """Raises when a bad line, already counted, is one too many."""
    if policy is OnError.STOP:
        raise DataError(
            f"{place}: {bad.cause}. Repair or remove the line, or leave such lines out with --on-error skip."
        )
    total = sum(counts.values())
    if max_bad is not None and total > max_bad:
        causes = ", ".join(f"{number} {cause}" for cause, number in counts.most_common())
        raise DataError(f"{total} bad lines are more than --max-bad {max_bad} ({causes}); the last is {place}.")
