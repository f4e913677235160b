"""The run's own record: metrics.jsonl, one JSON object a line, and the only truth that displays and reports read.

Written by the training loop, read by reports and by whoever compares two runs. It reads no clock: times come in
the rows. Every row has `event` (one of EVENTS), `step` and `attempt`, one of `eval` also the `name` of what was
measured; the rest is up to the event.
Numbers round-trip exactly; those that JSON lacks are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from lmtrain.errors import DataError, MissingInputError
from lmtrain.observe.growing_file import GrowingFile
from lmtrain.observe.safe_text import warn
from lmtrain.runtime.files.files import json_bytes
from lmtrain.units import format_bytes

EVENTS = ("start", "step", "valid", "eval", "save", "forecast", "memory", "stop")
_ROW_BYTES = 1 << 20  # no row is longer
_END_BYTES = 1 << 18
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows that count, in order of writing.

    A later attempt began again at the step of its start row: whatever an earlier one wrote beyond that step is
    gone, and of two rows with the same event, step (of saves, the saved one) and name the last one stands.
    """
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for row in _read_rows(path):
        if row["event"] == "start":
            rows = {key: old for key, old in rows.items() if key[0] == "start" or key[1] <= row["step"]}
        key = (row["event"], step_told(row), str(row.get("name")))
        rows.pop(key, None)  # the last one also takes the last place
        rows[key] = row
    return list(rows.values())


def step_told(row: Mapping[str, Any]) -> int:
    """The step that a row is about. That of a save is written when the run has gone on from it."""
    saved = row.get("saved_step") if row["event"] == "save" else None
    return saved if isinstance(saved, int) else int(row["step"])


def read_last_rows(path: Path) -> list[dict[str, Any]]:
    """Some hundreds of the newest rows, for estimates: what is damaged, or not there, tells nothing."""
    try:
        with open(path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _END_BYTES, 0))
            lines = file.read(_END_BYTES).split(b"\n")
    except OSError:
        return []
    rows = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            rows += [row] if isinstance(row, dict) else []
    return rows


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line)
            if not isinstance(row["event"], str) or not isinstance(row["step"], int):
                raise TypeError("event or step has the wrong type")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if not line.endswith(b"\n"):  # torn when the writer was killed
                break
            raise DataError(f"{path}:{number} is not a row of metrics ({error}). Remove that line.") from error
        rows.append({key: read_value(value) for key, value in row.items()})
    return rows


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            for number in count(1):
                line = file.readline(_ROW_BYTES + 1)
                if len(line) > _ROW_BYTES:
                    raise DataError(
                        f"{path}:{number} is longer than {format_bytes(_ROW_BYTES)}, which no row of metrics is. "
                        "Remove that line, or copy the file from where it is whole."
                    )
                if not line:
                    return
                yield line
    except FileNotFoundError as error:
        raise MissingInputError(f"{path} does not exist. Give a run folder that has been trained in.") from error


def writable(value: Any) -> Any:
    """Plain JSON data; a number that it cannot hold is a text.

    Tensors and numpy scalars are refused by json, so that nobody waits for a device in here.
    """
    if isinstance(value, Mapping):
        return {str(key): writable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [writable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def read_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: read_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [read_value(item) for item in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
