"""What happens to bad lines: stop, skip or quarantine, counted by cause. Called in the input's order by all who read.

The rejects file has one JSON object a line: file, line (or row), byte, cause, and in quarantine the line itself.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from data_tools.read.chunks import Chunk
from data_tools.read.content import Bad
from lmtrain.errors import DataError
from lmtrain.runtime.files.files import read_errors

_READ_BYTES = 1 << 20


class OnError(StrEnum):
    STOP = "stop"
    SKIP = "skip"
    QUARANTINE = "quarantine"


@dataclass
class BadLines:
    """Told of one chunk after the other."""

    on_error: OnError
    max_bad: int | None = None
    counts: Counter[str] = field(default_factory=Counter)
    line: int = 0  # how many of the source were read

    def __post_init__(self) -> None:
        self._counter = _LineCounter()

    def add(self, chunk: Chunk, bad: Sequence[Bad], num_lines: int) -> bytes:
        """The lines of the rejects file for a chunk; raises at a bad line too many."""
        if chunk.start == 0:
            self.line = 0
        before = self._counter.before(chunk.path, chunk.start) if chunk.plain and bad else self.line
        rejects = []
        for one in bad:
            self.counts[one.kind] += 1
            line = before + one.line + 1
            self._check(where(chunk, line, one), one)
            rejects.append(_record(chunk, line, one))
        self.line += num_lines
        return b"".join(rejects)

    def _check(self, place: str, bad: Bad) -> None:
        if self.on_error is OnError.STOP:
            raise DataError(
                f"{place}: {bad.cause}. Repair or remove the line, or leave such lines out with --on-error skip."
            )
        total = self.counts.total()
        if self.max_bad is not None and total > self.max_bad:
            causes = ", ".join(f"{number} {cause}" for cause, number in self.counts.most_common())
            most = f"--max-bad {self.max_bad}"
            raise DataError(f"{total} bad lines are more than {most} ({causes}); the last is {place}.")


class _LineCounter:
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


def where(chunk: Chunk, line: int, bad: Bad) -> str:
    if chunk.kind == "parquet":
        return f"{chunk.path}, row {line}"
    return f"{chunk.path}:{line} (byte {bad.offset})"


def _record(chunk: Chunk, line: int, bad: Bad) -> bytes:
    """One line of the rejects file."""
    tree: dict[str, Any] = {"file": str(chunk.path)}
    tree |= {"row": line} if chunk.kind == "parquet" else {"line": line, "byte": bad.offset}
    tree["cause"] = bad.cause
    if bad.content is not None:
        try:
            tree["content"] = bad.content.decode()
        except UnicodeDecodeError:
            tree["content_base64"] = base64.b64encode(bad.content).decode()
    return json.dumps(tree, ensure_ascii=False).encode() + b"\n"
