"""The rows of metrics.jsonl, one JSON object a line: all that count, the newest, or each as it comes. Torch-free.

Called by a run that goes on, and by whoever looks at a run. Every row has `event`, `step` and `attempt`, one of `eval`
also the `name` of what was measured; the rest is up to the event. Numbers round-trip exactly; those that JSON lacks
are the strings "nan", "inf" and "-inf". The one writer is lmtrain/observe/metrics.py. A damaged line is refused by its
number in `read_metrics`, and passed over where the newest rows or each as it comes are read, as `runs` and `watch` do;
reports, which want all columns, read by lmtrain/observe/history/record.py.
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

ROW_BYTES = 1 << 20  # no row is longer
NO_ROW = (ValueError, KeyError, TypeError, RecursionError)  # what `parse_row` may raise
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FEW_BYTES = 1 << 18  # some hundreds of rows
_TAIL_BYTES = 4 << 20  # because: ten thousand rows show where a run is, and are read in a blink


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows that count, in order of writing. A line that is no row is refused by its number.

    A later attempt began again at the step of its start row: whatever an earlier one wrote beyond that step is
    gone, and of two rows with the same event, step (of saves, the saved one) and name the last one stands.
    """
    rows: dict[tuple[str, int, str], Row] = {}
    for row in _read_rows(path):
        if row["event"] == "start":
            rows = {key: old for key, old in rows.items() if key[0] == "start" or key[1] <= row["step"]}
        key = (row["event"], step_told(row), str(row.get("name")))
        rows.pop(key, None)  # the last one also takes the last place
        rows[key] = row
    return list(rows.values())


def step_told(row: Mapping[str, Any]) -> int:
    """Return the step that a row is about. That of a save is written when the run has gone on from it."""
    saved = row.get("saved_step") if row["event"] == "save" else None
    return saved if isinstance(saved, int) else int(row["step"])


def _read_rows(path: Path) -> Iterator[Row]:
    try:
        for number, line in enumerate(read_lines(path), 1):
            if len(line) > ROW_BYTES:
                raise DataError(
                    f"{path}:{number} is longer than {ROW_BYTES >> 20} MiB, which no row of metrics is. "
                    "Remove that line, or copy the file from where it is whole."
                )
            try:
                row = parse_row(line)
            except NO_ROW as error:
                if not line.endswith(b"\n"):  # torn when the writer was killed
                    return
                raise DataError(f"{path}:{number} is not a row of metrics ({error}). Remove that line.") from error
            yield read_value(row)
    except FileNotFoundError as error:
        raise MissingInputError(f"{path} does not exist. Give a run folder that has been trained in.") from error


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield each line; of one that is longer than any row, a beginning that is too long as well."""
    with open(path, "rb") as file:
        while line := file.readline(ROW_BYTES + 1):
            yield line
            while len(line) > ROW_BYTES and not line.endswith(b"\n"):
                line = file.readline(ROW_BYTES + 1)


def parse_row(line: bytes) -> Row:
    """Return the row of a line, with texts for numbers that JSON lacks. Of what is no row raise one of NO_ROW."""
    row: Row = json.loads(line)
    if type(row["event"]) is not str or type(row["step"]) is not int:
        raise TypeError("event or step has the wrong type")
    return row


class Followed:
    """The newest rows and then each that is added: `rows()` gives what has come since the last call.

    The file may grow, be cut back by a run that goes on, or not be there yet; what is torn or damaged tells nothing.
    """

    def __init__(self, path: Path, tail_bytes: int = _TAIL_BYTES) -> None:
        self._path, self._tail_bytes, self._at = path, tail_bytes, -1

    def rows(self) -> list[Row]:
        with suppress(OSError), open(self._path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if self._at < 0 or size < self._at:
                self._at = self._begin(file, size)
            file.seek(self._at)
            whole, _, _ = file.read(size - self._at).rpartition(b"\n")
            self._at += len(whole) + bool(whole)
            return list(_rows_among(whole.split(b"\n")))
        return []

    def _begin(self, file: IO[bytes], size: int) -> int:
        """Return where the first whole line of the newest bytes stands."""
        if size <= self._tail_bytes:
            return 0
        file.seek(size - self._tail_bytes)
        return size - self._tail_bytes + len(file.readline())


def read_last_rows(path: Path) -> list[Row]:
    """Return some hundreds of the newest rows, for estimates: what is damaged, or not there, tells nothing."""
    return Followed(path, _FEW_BYTES).rows()


def read_first_step(path: Path) -> Row:
    """Return the oldest row of a step; an empty one where none can be read."""
    with suppress(OSError):
        return next((row for row in _rows_among(read_lines(path)) if row.get("event") == "step"), {})
    return {}


def went_wrong(first: Row, last: Row) -> str:
    """Return what the losses of a run that came to its end say against it, from its first and its last step."""
    began, ended = (row.get("loss") for row in (first, last))
    if not isinstance(ended, float | int):
        return ""
    if not math.isfinite(ended):
        return "loss not finite"
    return "loss above its first" if isinstance(began, float | int) and ended > began else ""


def written_at(rows: Sequence[Row], path: Path) -> str | None:
    """Return when the last row was written; those of older versions carry no time, and their file's has to do."""
    if rows and isinstance(rows[-1].get("time"), str):
        return str(rows[-1]["time"])
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    except OSError:
        return None


def _rows_among(lines: Iterable[bytes]) -> Iterator[Row]:
    for line in lines:
        with suppress(*NO_ROW):
            yield read_value(parse_row(line))


def writable(value: Any) -> Any:
    """Return plain JSON data; a number that it cannot hold is a text.

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
    """Return what `writable` has made a text of as the number that it was."""
    if isinstance(value, dict):
        return {key: read_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [read_value(item) for item in value]
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value
