"""The readers of metrics.jsonl, one JSON object per line: all valid rows, the newest, or new ones. Torch-free.

Used by a run that resumes, and by commands that show a run. Every row has `event`, `step` and `attempt`, and an `eval`
row also the `name` of the evaluation; the other keys depend on the event. Numbers round-trip exactly; nan, inf and
-inf, which JSON lacks, are the strings "nan", "inf" and "-inf". The one writer is lmtrain/observe/metrics.py.
`read_metrics` raises on a damaged line and names its number; the readers of the newest rows (for `runs` and `watch`)
skip a damaged line. Reports, which need whole columns, read with lmtrain/observe/history/read_metrics_columns.py.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from lmtrain.errors import DataError, MissingInputError

Row = dict[str, Any]

ROW_BYTES = 1 << 20  # longest allowed row
ROW_ERRORS = (ValueError, KeyError, TypeError, RecursionError)  # exceptions that `parse_row` may raise
NON_FINITE_TEXTS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FEW_ROWS_BYTES = 1 << 18  # a few hundred rows
_TAIL_BYTES = 4 << 20  # because: the last ten thousand or so rows show a run's progress and are read in milliseconds


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl in the order of writing, without those that a restart made obsolete: rows
    beyond the step at which a later start resumed, and repeated rows of one event, step and name, of which the last
    counts. Raise DataError, with the line's number, if a line is not a row.
    """
    return rows_in_force(_read_all_rows(path))


def rows_in_force(written: Iterable[Row]) -> list[Row]:
    """Return rows in the order of writing, without those that a restart made obsolete, as `read_metrics` does."""
    rows: dict[tuple[str, int, str], Row] = {}
    for row in written:
        if row["event"] == "start":
            rows = {key: old for key, old in rows.items() if key[0] == "start" or key[1] <= row["step"]}
        key = (row["event"], row_step(row), str(row.get("name")))
        rows.pop(key, None)  # because: the last row also takes the last position
        rows[key] = row
    return list(rows.values())


def row_step(row: Mapping[str, Any]) -> int:
    """Return the step that a row is about: `saved_step` for a save, whose `step` is the step at which it finished."""
    saved = row.get("saved_step") if row["event"] == "save" else None
    return saved if isinstance(saved, int) else int(row["step"])


def _read_all_rows(path: Path) -> Iterator[Row]:
    try:
        for number, line in enumerate(read_lines(path), 1):
            if len(line) > ROW_BYTES:
                raise DataError(
                    f"{path}:{number} is longer than {ROW_BYTES >> 20} MiB, which no row of metrics is. "
                    "Remove that line, or restore the file from a copy."
                )
            try:
                row = parse_row(line)
            except ROW_ERRORS as error:
                if not line.endswith(b"\n"):  # because: the writer was killed while writing the last line
                    return
                raise DataError(f"{path}:{number} is not a row of metrics ({error}). Remove that line.") from error
            yield from_json_data(row)
    except FileNotFoundError as error:
        raise MissingInputError(f"{path} does not exist. Give the folder of a run that has begun to train.") from error


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield each line of a file as bytes, with its newline. A line longer than ROW_BYTES is cut to ROW_BYTES + 1 bytes,
    so that no line can fill the memory.
    """
    with open(path, "rb") as file:
        while line := file.readline(ROW_BYTES + 1):
            yield line
            while len(line) > ROW_BYTES and not line.endswith(b"\n"):
                line = file.readline(ROW_BYTES + 1)


def parse_row(line: bytes) -> Row:
    """Parse a line of metrics.jsonl to a dict, in which nan, inf and -inf are still strings. Raise one of ROW_ERRORS if
    the line is not JSON, or lacks a text `event` or an integer `step`.
    """
    row: Row = json.loads(line)
    if type(row["event"]) is not str or type(row["step"]) is not int:
        raise TypeError("event is not a text, or step not a whole number")
    return row


class RowFollower:
    """Reader of a growing file: `rows()` returns first the newest rows, then those added since the last call.

    The file may grow, be truncated by a run that resumes, or not exist yet; torn and damaged lines are skipped.
    """

    def __init__(self, path: Path, tail_bytes: int = _TAIL_BYTES) -> None:
        self._path, self._tail_bytes, self._offset = path, tail_bytes, -1

    def rows(self) -> list[Row]:
        with suppress(OSError), open(self._path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if self._offset < 0 or size < self._offset:
                self._offset = self._find_start(file, size)
            file.seek(self._offset)
            complete_lines, _, _ = file.read(size - self._offset).rpartition(b"\n")
            self._offset += len(complete_lines) + bool(complete_lines)
            return list(_valid_rows(complete_lines.split(b"\n")))
        return []

    def _find_start(self, file: IO[bytes], size: int) -> int:
        """Return the byte offset at which to start reading a file of `size` bytes: the first line that begins within
        its last `tail_bytes` bytes; 0 if the file is not longer.
        """
        if size <= self._tail_bytes:
            return 0
        file.seek(size - self._tail_bytes)
        return size - self._tail_bytes + len(file.readline())


def read_last_rows(path: Path) -> list[Row]:
    """Return the newest few hundred rows, for estimates; empty if the file is missing. Damaged lines are skipped, and
    rows that a restart made obsolete are among them.
    """
    return RowFollower(path, _FEW_ROWS_BYTES).rows()


def read_first_step(path: Path) -> Row:
    """Return the first row of a metrics.jsonl that is about a training step; {} if there is none or the file cannot be
    read.
    """
    with suppress(OSError):
        return next((row for row in _valid_rows(read_lines(path)) if row.get("event") == "step"), {})
    return {}


def loss_warning(first_row: Row, last_row: Row) -> str:
    """Return "loss not finite" if the loss of a finished run's last step row is nan or infinite, "loss above its first"
    if it is larger than that of the first step row, and otherwise "".
    """
    first_loss, last_loss = (row.get("loss") for row in (first_row, last_row))
    if not isinstance(last_loss, float | int):
        return ""
    if not math.isfinite(last_loss):
        return "loss not finite"
    return "loss above its first" if isinstance(first_loss, float | int) and last_loss > first_loss else ""


def last_write_time(rows: Sequence[Row], path: Path) -> str | None:
    """Return the ISO time at which the last of `rows`, the rows of the metrics file `path`, was written. If it does not
    record its time, return the file's modification time, or None if there is no such file.
    """
    if rows and isinstance(rows[-1].get("time"), str):
        return str(rows[-1]["time"])
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    except OSError:
        return None


def _valid_rows(lines: Iterable[bytes]) -> Iterator[Row]:
    for line in lines:
        with suppress(*ROW_ERRORS):
            yield from_json_data(parse_row(line))


def to_json_data(value: Any) -> Any:
    """Return a copy of nested data that JSON can store: nan, inf and -inf become strings, tuples become lists, and keys
    become texts.

    Tensors and numpy scalars are left as they are, and json refuses them, so that no device is synchronized here.
    """
    if isinstance(value, Mapping):
        return {str(key): to_json_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_data(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_json_data(value: Any) -> Any:
    """Return a copy of nested data in which the strings "nan", "inf" and "-inf" are floats again, as before
    `to_json_data`. Tuples stay lists.
    """
    if isinstance(value, dict):
        return {key: from_json_data(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json_data(item) for item in value]
    return NON_FINITE_TEXTS.get(value, value) if isinstance(value, str) else value
