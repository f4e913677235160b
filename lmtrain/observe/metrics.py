"""Append-only files of a run's record, and the most important one: metrics.jsonl, one JSON object per line.

A `GrowingFile` is appended in whole records. A full or failing disk loses records but does not stop the run: the first
lost record is reported, and later, when writing works again, the number of lost ones. A partly written record is
truncated, so the file always holds whole records. The log and the event files are GrowingFiles, too.

`MetricsLog` is written by the training loop, and is the only source that displays and reports read. It reads no clock:
times are part of the rows. Every row has `event` (one of EVENTS), `step` and `attempt`. The readers are in
lmtrain/runfolder/metrics_rows.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# because: documentation pages and users' programs import it from here
from lmtrain.runfolder.metrics_rows import read_metrics as read_metrics
from lmtrain.runfolder.metrics_rows import to_json_data
from lmtrain.runtime.files.atomic_files import json_bytes, open_output, storage_errors
from lmtrain.runtime.files.explain_os_errors import limit_reached
from lmtrain.runtime.terminal_safe_text import warn

_TAIL_BYTES = 1 << 16
EVENTS = ("start", "stage", "step", "valid", "eval", "save", "forecast", "memory", "stop")


class GrowingFile:
    """An append-only file of records, which survives a failing disk.

    `unit` names the records in messages, such as "rows". `report` receives these messages: lost records, and that
    writing works again. `head` is written at the start of an empty file. With `new` the file must not exist yet.
    """

    def __init__(
        self, path: Path, unit: str, report: Callable[[str], None] = warn, *, head: bytes = b"", new: bool = False
    ) -> None:
        self.path, self.num_lost = path, 0  # `num_lost`: records since the last successful write
        self._unit, self._report, self._head = unit, report, head
        with storage_errors(path, "Opening"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = open_output(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | (os.O_EXCL if new else 0))
        self._size = os.fstat(self._fd).st_size
        self._torn = False  # the file may be longer than _size
        self._failing = False  # writing has failed, and this was reported
        if head:
            self.append(b"")

    def append(self, record: bytes) -> None:
        """Write one record, the bytes of a whole line or entry. If the disk is full or fails, drop the record, count it
        in `num_lost`, and raise nothing.
        """
        try:
            self._write(record if self._size else self._head + record)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)  # because: the record may have been written in part
                self._torn = False
            self.num_lost += bool(record)
            if not self._failing:
                self._failing = True
                reason = limit_reached(error, self.path) or f"{error.strerror}. Look at its disk."
                self._report(
                    f"Writing {self.path} failed: {reason} Training goes on; {self._unit} are lost until writing works."
                )
            return
        if self._failing:
            num_lost, self.num_lost, self._failing = self.num_lost, 0, False
            self._report(f"Writing {self.path} works again; {num_lost} {self._unit} were lost.")

    def last_line(self) -> bytes:
        """Return the bytes after the last newline, within the last 64 KiB; empty if the last line is complete."""
        start = max(self._size - _TAIL_BYTES, 0)
        return os.pread(self._fd, self._size - start, start).rpartition(b"\n")[2]

    def truncate_end(self, num_bytes: int) -> None:
        """Remove the last `num_bytes` bytes of the file."""
        with storage_errors(self.path, "Writing"):
            os.ftruncate(self._fd, self._size - num_bytes)
        self._size -= num_bytes

    def close(self) -> None:
        if self.num_lost:
            self._report(f"The last {self.num_lost} {self._unit} of {self.path} are lost, as writing failed.")
        with suppress(OSError):
            os.close(self._fd)

    def _write(self, data: bytes) -> None:
        if self._torn:
            os.ftruncate(self._fd, self._size)
        self._torn, rest = True, memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        self._size += len(data)
        self._torn = False


class MetricsLog:
    """Writer of metrics.jsonl. A partial line, left by a killed writer, is truncated when the file is opened."""

    def __init__(self, path: Path, report: Callable[[str], None] = warn) -> None:
        self._file = GrowingFile(path, "rows", report)
        while torn := self._file.last_line():
            self._file.truncate_end(len(torn))

    def append(self, row: Mapping[str, Any]) -> None:
        """Append `row` to metrics.jsonl as a line of JSON. Raise ValueError if its `event` is unknown, or if it lacks a
        `step` or an `attempt`.
        """
        if row.get("event") not in EVENTS or "step" not in row or "attempt" not in row:
            raise ValueError(f"The metrics row {dict(row)} must have a step, an attempt and an event of {EVENTS}.")
        # one write per row, so that a reader never sees half of a row
        self._file.append(json_bytes(to_json_data(row), allow_nan=False, separators=(", ", ": ")) + b"\n")

    def close(self) -> None:
        self._file.close()
