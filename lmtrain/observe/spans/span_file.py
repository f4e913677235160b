"""One process's file of spans while it is written: memory that the system keeps on disk, whatever becomes of us.

Called by the recorder. Room on the disk is taken piece by piece before it is written to: a write into memory for which
the disk has no room would end the process.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

from lmtrain.errors import LmtrainError
from lmtrain.observe.spans.format import (
    HEADER_BYTES,
    MOST_NAMES,
    NAME_BYTES,
    RECORD,
    WRITTEN_AT,
    Header,
    place_of,
    write_name,
)
from lmtrain.runtime.files.files import open_output, storage_errors

_FIRST_ROOM = 4096  # records: a few steps of most layouts


class SpanFile:
    def __init__(self, path: Path, header: Header) -> None:
        """The file must not be there yet. StorageError or OutputError where the disk does not take it."""
        self.path, self.capacity = path, header.capacity
        self.problem: str | None = None  # in words; from then on nothing is written
        self.num_written, self._room = 0, 0
        self._at, self._lap, self._left = HEADER_BYTES, 1, 0  # where the next goes, and so many fit behind each other
        self.names: dict[str, int] = {"": 0}
        with storage_errors(path, "Opening"):
            path.parent.mkdir(exist_ok=True)
            self._fd = open_output(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            with storage_errors(path, "Writing"):
                os.ftruncate(self._fd, HEADER_BYTES + self.capacity * RECORD.size)
                self._make_room(min(_FIRST_ROOM, self.capacity))
                self._memory = mmap.mmap(self._fd, HEADER_BYTES + self.capacity * RECORD.size)
        except Exception:
            os.close(self._fd)
            with suppress(OSError):
                path.unlink()
            raise
        self._memory[:HEADER_BYTES] = header.pack()
        self._counted = memoryview(self._memory)[WRITTEN_AT : WRITTEN_AT + 8].cast("Q")

    def write(
        self, begin_ns: int, end_ns: int, num_bytes: int, step: int, number: int, microbatch: int, peer: int,
        stage: int, name: int, kind: int, axis: int, flags: int,
    ) -> None:  # fmt: skip
        """SPAN's fields without the lap. Never fails: a full disk leaves a `problem`, and the file as it is."""
        if not self._left:
            self._find_place()
        if self.problem is None:
            # because: one by one they cost a fifth of a span less than as a tuple
            RECORD.pack_into(
                self._memory, self._at, begin_ns, end_ns, num_bytes, step, number, microbatch, peer, stage, name, kind,
                axis, flags, self._lap,
            )  # fmt: skip
            self.num_written = self._counted[0] = self.num_written + 1  # because: what is counted is whole
            self._at += RECORD.size
            self._left -= 1

    def number_of(self, name: str) -> int:
        """Of names that no header has room for, as of none: 0."""
        found = self.names.get(name)
        if found is None:
            found = self.names[name] = len(self.names) if len(self.names) < MOST_NAMES else 0
            if found:
                write_name(self._memory, found, name[:NAME_BYTES])
        return found

    def close(self) -> None:
        """What was taken of the disk and not written to is given back."""
        self._counted.release()
        self._memory.close()
        with suppress(OSError):
            os.ftruncate(self._fd, HEADER_BYTES + min(self.num_written, self.capacity) * RECORD.size)
        with suppress(OSError):
            os.close(self._fd)

    def _find_place(self) -> None:
        """For the next record: on new room, or at the beginning again."""
        if self.num_written == self._room < self.capacity and self.problem is None:
            try:
                with storage_errors(self.path, "Writing"):
                    self._make_room(min(2 * self._room, self.capacity))
            except LmtrainError as error:
                self.problem = str(error)
        self._at, self._lap = place_of(self.num_written, self.capacity)
        self._left = self._room - self.num_written % self.capacity

    def _make_room(self, num_records: int) -> None:
        os.posix_fallocate(self._fd, 0, HEADER_BYTES + num_records * RECORD.size)
        self._room = num_records
