"""The run's own record: metrics.jsonl, one JSON object a line, and the only truth that displays and reports read.

Written by the training loop. It reads no clock: times come in the rows. Every row has `event` (one of EVENTS), `step`
and `attempt`. How rows are read is in lmtrain/runfolder/rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmtrain.observe.growing_file import GrowingFile
from lmtrain.observe.safe_text import warn

# because: this is where pages and programs of users import it from
from lmtrain.runfolder.rows import read_metrics as read_metrics
from lmtrain.runfolder.rows import writable
from lmtrain.runtime.files.files import json_bytes

EVENTS = ("start", "step", "valid", "eval", "save", "forecast", "memory", "stop")


class MetricsLog:
    """Appends rows to a file that always holds whole lines: what a kill tore off is cut away when it is opened."""

    def __init__(self, path: Path, say: Callable[[str], None] = warn) -> None:
        self._file = GrowingFile(path, "rows", say)
        while torn := self._file.last_line():
            self._file.cut_back(len(torn))

    def append(self, row: Mapping[str, Any]) -> None:
        if row.get("event") not in EVENTS or "step" not in row or "attempt" not in row:
            raise ValueError(f"a metrics row needs a known event, a step and an attempt, not {dict(row)}")
        # one write a row: a reader never sees half of one
        self._file.append(json_bytes(writable(row), allow_nan=False, separators=(", ", ": ")) + b"\n")

    def close(self) -> None:
        self._file.close()
