"""External sort for more rows than fit in memory: sorted runs on disk, merged block by block.

Called by deduplication. Rows are tuples of unsigned 64-bit numbers, compared column by column. This file does not know
what the numbers mean.
"""

from __future__ import annotations

import bisect
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import numpy.typing as npt

from lmtrain.runtime.files.atomic_files import storage_errors

Rows = npt.NDArray[np.uint64]  # [num_rows, columns]
MEMORY_BYTES = 256 << 20


class Sorter:
    """Context manager that sorts rows; its temporary files are in `folder` and are removed at the end."""

    def __init__(self, columns: int, folder: Path, memory_bytes: int = MEMORY_BYTES) -> None:
        self._columns, self._folder = columns, folder
        # because: while a run is sorted, the rows, their order and the sorted copy are in memory together
        self._run_rows = max(memory_bytes // (8 * (2 * columns + 2)), 16)
        self._pending: list[Rows] = []
        self._num_pending = 0
        self._runs: list[Path] = []

    def __enter__(self) -> Sorter:
        with storage_errors(self._folder, "Making"):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._temporary = tempfile.TemporaryDirectory(prefix=".sort-", dir=self._folder)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._temporary.cleanup()

    def add(self, rows: Rows) -> None:
        """Add rows to be sorted, each a row of `columns` unsigned 64-bit numbers. Rows beyond the memory limit are
        sorted and moved to a temporary file.
        """
        while rows.size:
            room = self._run_rows - self._num_pending
            self._pending.append(rows[:room].copy())
            self._num_pending += len(self._pending[-1])
            rows = rows[room:]
            if self._num_pending == self._run_rows:
                self._spill()

    def batches(self) -> Iterator[Rows]:
        """Yield all added rows in ascending order, as arrays of many rows. No rows can be added afterwards."""
        if not self._runs:
            if self._pending:
                yield sort_rows(np.concatenate(self._pending))
            return
        if self._pending:
            self._spill()
        block = max(self._run_rows // len(self._runs), 16)
        with ExitStack() as opened:
            runs = [_Run(opened.enter_context(open(path, "rb")), self._columns, block) for path in self._runs]
            while runs := [run for run in runs if len(run.rows)]:
                # because: rows up to the smallest of the runs' last loaded rows are all in memory
                bound = min((list(map(int, run.rows[-1])) for run in runs if run.has_more), default=None)
                yield sort_rows(np.concatenate([run.take(bound) for run in runs]))

    def distinct(self) -> Iterator[Rows]:
        """Yield all added rows in ascending order without repetitions, as arrays of many rows."""
        last = np.empty((0, self._columns), np.uint64)
        for batch in self.batches():
            rows = np.concatenate([last, batch])
            fresh = np.ones(len(rows), bool)
            fresh[1:] = (rows[1:] != rows[:-1]).any(axis=1)
            fresh[: len(last)] = False
            yield rows[fresh]
            last = rows[-1:]

    def _spill(self) -> None:
        """Sort the rows that are in memory and move them to a new temporary file."""
        path = Path(self._temporary.name) / f"run-{len(self._runs):06d}"
        with storage_errors(path, "Writing"), open(path, "wb", buffering=0) as file:
            unwritten = np.ascontiguousarray(sort_rows(np.concatenate(self._pending))).data.cast("B")
            while unwritten:  # because: numpy's tofile does not report the cause of a failure
                unwritten = unwritten[file.write(unwritten) :]
        self._runs.append(path)
        self._pending, self._num_pending = [], 0


def sort_rows(rows: Rows) -> Rows:
    """Return rows in ascending order, compared column by column from the first."""
    return rows[np.lexsort(rows.T[::-1])]


class _Run:
    """A temporary file of sorted rows, of which one block at a time is in memory."""

    def __init__(self, file: IO[bytes], columns: int, block: int) -> None:
        self._file, self._columns, self._block = file, columns, block
        self._fill()

    def _fill(self) -> None:
        """Load the next block of the run."""
        self.rows = np.fromfile(self._file, np.uint64, self._block * self._columns).reshape(-1, self._columns)
        self.has_more = len(self.rows) == self._block

    def take(self, bound: list[int] | None) -> Rows:
        """Remove and return the rows in memory that are not greater than the row `bound` (None: all rows). If no row is
        left in memory, load the next block of the file.
        """
        count = len(self.rows)
        if bound is not None:
            count = bisect.bisect_right(range(count), bound, key=lambda i: list(map(int, self.rows[i])))
        rows, self.rows = self.rows[:count], self.rows[count:]
        if self.has_more and not len(self.rows):
            self._fill()
        return rows


