"""The trace file of one process and start: a header, then a ring of fixed-size records. Torch-free.

The recorder writes it through a `SpanFile`, a memory-mapped file that the system keeps whatever happens to the process.
Timelines read it, also while the run goes on and after a kill. The format does not list the members of a collective:
they follow from the axis and the sizes in the header.

A record is complete before the counter includes it. The next record overwrites the oldest, so in a full ring the oldest
record is never read: it may be half overwritten. Disk space is allocated in pieces before it is written to, because a
write to mapped memory without disk space would kill the process.
"""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError, LmtrainError
from lmtrain.runtime.files.atomic_files import open_fd, open_output, read_errors, read_range, storage_errors
from lmtrain.runtime.processes.current_phase import unpack_text

HEADER_BYTES, VERSION = 4096, 1
NAME_BYTES = 48
_MAGIC = b"LMSPANS\n"
# the fields known when the file is opened; their CRC-32 follows them
_FIXED = struct.Struct("<8s7Iqq4I5I64s32s")
_SUM = struct.Struct("<I")
COUNTER, COUNTER_AT = struct.Struct("<Q"), 512  # number of records so far
_NUM_NAMES, _NUM_NAMES_AT = struct.Struct("<I"), 520
_NAMES_AT = 1024
MAX_NAMES = (HEADER_BYTES - _NAMES_AT) // NAME_BYTES
MAX_RECORDS = 1 << 20
_FIRST_ALLOCATION = 4096  # records; enough for a few steps of most layouts


class Kind(IntEnum):
    STEP = 0  # from the wait for its data to the wait for the next step's; contains the step's other spans
    DATA = 1  # the wait for the step's data
    FORWARD = 2  # of one stage and micro-batch, after its input has arrived
    BACKWARD = 3
    INPUT = 4  # the half of a backward that computes the input's gradient, for which the previous stage waits
    WEIGHT = 5  # the half that computes the weights' gradients
    COLLECTIVE = 6  # over the axis; with a `peer`, an exchange with that rank alone
    SEND = 7  # sending a message; with Flag.EARLY, the wait until a message sent before has been taken
    RECEIVE = 8  # the wait for a message
    OPTIMIZER = 9  # from the end of the last backward to the end of the update
    SAVE = 10
    VALIDATION = 11
    EVALUATION = 12
    OTHER = 13


class Axis(IntEnum):
    NONE = 0
    PP = 1
    DP = 2  # replicate x shard
    DP_REPLICATE = 3
    DP_SHARD = 4
    TP = 5
    PLANE = 6  # all axes but pp
    WORLD = 7


class Flag(IntFlag):
    EARLY = 1  # started earlier, and the span is only the wait for it: gives no bound on when other ranks began
    DEVICE = 2  # timed by the device, converted to the host's clock
    ASIDE = 4  # beside the computation, on another stream or thread: the computation need not wait for it


SPAN = np.dtype([
    ("begin_ns", "<i8"), ("end_ns", "<i8"),  # by the process's monotonic clock
    ("num_bytes", "<u8"),  # size of the message, or of the whole tensor that is summed, gathered or scattered
    ("step", "<u4"),  # as in metrics: the first step is 1
    # index, from 0, of the message in the step from this rank to the peer, or of the collective in the step over this
    # axis (with a peer: with that peer); equal on both ends and on all members
    ("number", "<u4"),
    ("microbatch", "<i4"), ("peer", "<i4"), ("stage", "<i2"),  # -1 if none; a message has the stage of its receiver
    ("name", "<u2"),  # index in the header's table; 0 is none
    ("kind", "u1"), ("axis", "u1"), ("flags", "u1"),
    ("lap", "u1"),  # of the ring, 1 to 255; 0 in a place that was never written
])  # fmt: skip
RECORD = struct.Struct("<qqQIIiihHBBBB")  # the same layout, as the recorder packs it


@dataclass(frozen=True)
class Header:
    rank: int
    world_size: int
    coordinate: tuple[int, int, int, int]  # pp, dp_replicate, dp_shard, tp
    sizes: tuple[int, int, int, int, int]  # pp, vp, dp_replicate, dp_shard, tp
    host: str
    pid: int
    start: int  # number of this start of the run, from 0; equal on all ranks
    wall_ns: int  # this clock and the next were read together
    monotonic_ns: int
    capacity: int
    schedule: str
    num_microbatches: int
    num_written: int = 0  # number of records since the file was opened
    names: tuple[str, ...] = ("",)

    def pack(self) -> bytes:
        """Return the header as the first HEADER_BYTES bytes of a trace file that has no records yet."""
        fixed = _FIXED.pack(
            _MAGIC, VERSION, self.rank, self.world_size, self.pid, self.start, self.num_microbatches, self.capacity,
            self.wall_ns, self.monotonic_ns, *self.coordinate, *self.sizes, self.host.encode(), self.schedule.encode(),
        )  # fmt: skip
        head = bytearray(HEADER_BYTES)
        head[: _FIXED.size + _SUM.size] = fixed + _SUM.pack(crc32(fixed))
        for number, name in enumerate(self.names):
            write_name(head, number, name)
        return bytes(head)


@dataclass(frozen=True)
class RankSpans:
    header: Header
    spans: NDArray[Any]  # dtype SPAN, in order of begin times; of spans that begin together the longer first


def record_position(number: int, capacity: int) -> tuple[int, int]:
    """Return (file offset, lap) of the record `number`, counted from 0 since the file was opened. The file has room for
    `capacity` records; the lap, 1 to 255, changes each time it is filled.
    """
    lap, slot = divmod(number, capacity)
    return HEADER_BYTES + slot * RECORD.size, lap % 255 + 1


def write_name(memory: Any, number: int, name: str) -> None:
    """Write a name into the header's table at index `number`, which is the last one so far."""
    struct.pack_into(f"{NAME_BYTES}s", memory, _NAMES_AT + number * NAME_BYTES, name.encode())
    _NUM_NAMES.pack_into(memory, _NUM_NAMES_AT, number + 1)


class SpanFile:
    """Writer of the trace file of this process."""

    def __init__(self, path: Path, header: Header) -> None:
        """Create the file. Raise OutputError if it exists, or StorageError if the disk cannot hold it."""
        self.path, self.capacity = path, header.capacity
        self.problem: str | None = None  # a sentence; once set, nothing more is written
        self.num_written, self._num_allocated = 0, 0
        self._offset, self._lap = HEADER_BYTES, 1  # of the next record
        self._num_free = 0  # records that fit behind it
        self.name_indices: dict[str, int] = {"": 0}
        with storage_errors(path, "Opening"):
            path.parent.mkdir(exist_ok=True)
            self._fd = open_output(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            with storage_errors(path, "Writing"):
                os.ftruncate(self._fd, HEADER_BYTES + self.capacity * RECORD.size)
                self._allocate(min(_FIRST_ALLOCATION, self.capacity))
                self._memory = mmap.mmap(self._fd, HEADER_BYTES + self.capacity * RECORD.size)
        except Exception:
            os.close(self._fd)
            with suppress(OSError):
                path.unlink()
            raise
        self._memory[:HEADER_BYTES] = header.pack()
        self._counter = memoryview(self._memory)[COUNTER_AT : COUNTER_AT + 8].cast("Q")

    def write(
        self, begin_ns: int, end_ns: int, num_bytes: int, step: int, number: int, microbatch: int, peer: int,
        stage: int, name: int, kind: int, axis: int, flags: int,
    ) -> None:  # fmt: skip
        """Write one span, a traced interval of work, as a record of dtype SPAN. Times are in ns, `name` is an index
        into the header's table of names, and `kind`, `axis` and `flags` are values of Kind, Axis and Flag.

        Never raises: a full disk sets `problem`, and nothing more is written.
        """
        if not self._num_free:
            self._advance()
        if self.problem is None:
            # because: passing a tuple instead would make a span a fifth more expensive
            RECORD.pack_into(
                self._memory, self._offset, begin_ns, end_ns, num_bytes, step, number, microbatch, peer, stage, name,
                kind, axis, flags, self._lap,
            )  # fmt: skip
            self.num_written = self._counter[0] = self.num_written + 1  # because: a record in the count is complete
            self._offset += RECORD.size
            self._num_free -= 1

    def name_index(self, name: str) -> int:
        """Return the index of `name` in the table of names in the file's header. A new name is added; if the table is
        full, return 0, which stands for no name.
        """
        index = self.name_indices.get(name)
        if index is None:
            index = self.name_indices[name] = len(self.name_indices) if len(self.name_indices) < MAX_NAMES else 0
            if index:
                write_name(self._memory, index, name[:NAME_BYTES])
        return index

    def close(self) -> None:
        """Close the file, after cutting off the allocated space that holds no records."""
        self._counter.release()
        self._memory.close()
        with suppress(OSError):
            os.ftruncate(self._fd, HEADER_BYTES + min(self.num_written, self.capacity) * RECORD.size)
        with suppress(OSError):
            os.close(self._fd)

    def _advance(self) -> None:
        """Choose where in the file the next record goes, and allocate space if needed. Once the file has its full size,
        the oldest record is overwritten. If the disk is full, set `problem` to a message.
        """
        if self.num_written == self._num_allocated < self.capacity and self.problem is None:
            try:
                with storage_errors(self.path, "Writing"):
                    self._allocate(min(2 * self._num_allocated, self.capacity))
            except LmtrainError as error:
                self.problem = str(error)
        self._offset, self._lap = record_position(self.num_written, self.capacity)
        self._num_free = self._num_allocated - self.num_written % self.capacity

    def _allocate(self, num_records: int) -> None:
        os.posix_fallocate(self._fd, 0, HEADER_BYTES + num_records * RECORD.size)
        self._num_allocated = num_records


def span_file_name(rank: int, start: int) -> str:
    return f"rank-{rank:05d}{f'.{start}' if start else ''}.spans"


def read_spans(path: Path) -> RankSpans:
    """Return the header and all complete records of the trace file `path`. Raise DataError if the file is damaged in a
    way that a killed writer does not cause.
    """
    with read_errors(path), open_fd(path) as (fd, _):
        header = _parse_header(path, read_range(fd, 0, HEADER_BYTES))
        num_records = min(header.num_written, header.capacity)
        content = read_range(fd, HEADER_BYTES, num_records * SPAN.itemsize)
        # because: a running process may have overwritten records meanwhile
        newest_header = _parse_header(path, read_range(fd, 0, HEADER_BYTES))
    if len(content) < num_records * SPAN.itemsize:
        raise _damage_error(f"{path} ends before the last of its {num_records} records")
    numbers = np.arange(max(0, newest_header.num_written + 1 - header.capacity), header.num_written)
    spans = np.frombuffer(content, SPAN)[numbers % header.capacity]
    _check_spans(path, spans, numbers // header.capacity % 255 + 1, newest_header)
    return RankSpans(newest_header, spans[np.lexsort((-spans["end_ns"], spans["begin_ns"]))])


def _parse_header(path: Path, head: bytes) -> Header:
    if len(head) < HEADER_BYTES or not head.startswith(_MAGIC):
        raise _damage_error(f"{path} does not begin with the {HEADER_BYTES}-byte header of a trace file")
    _, version, *numbers, host, schedule = _FIXED.unpack_from(head)
    if version != VERSION:
        raise _damage_error(f"{path} has trace format {version}, but this lmtrain reads only format {VERSION}")
    if _SUM.unpack_from(head, _FIXED.size) != (crc32(head[: _FIXED.size]),):
        raise _damage_error(f"{path} has a header whose checksum is wrong")
    rank, world_size, pid, start, num_microbatches, capacity, wall_ns, monotonic_ns, *axes = numbers
    (num_written,), (num_names,) = COUNTER.unpack_from(head, COUNTER_AT), _NUM_NAMES.unpack_from(head, _NUM_NAMES_AT)
    if not (1 <= num_names <= MAX_NAMES and 1 <= capacity <= MAX_RECORDS and num_written < 1 << 62):
        raise _damage_error(f"{path} has an impossible header: {num_names} names and {num_written} records")
    return Header(
        rank, world_size, (axes[0], axes[1], axes[2], axes[3]), (axes[4], axes[5], axes[6], axes[7], axes[8]),
        unpack_text(host), pid, start, wall_ns, monotonic_ns, capacity, unpack_text(schedule), num_microbatches,
        num_written, tuple(unpack_text(head[_NAMES_AT + i * NAME_BYTES :][:NAME_BYTES]) for i in range(num_names)),
    )  # fmt: skip


def _check_spans(path: Path, spans: NDArray[Any], laps: NDArray[Any], header: Header) -> None:
    damages = {
        "are not in the order in which a run writes them": spans["lap"] != laps,
        "end before they begin": spans["end_ns"] < spans["begin_ns"],
        "have impossible times": (spans["begin_ns"] < 0) | (spans["end_ns"] >> 62 != 0),
        "have an unknown kind, axis or flag": (spans["kind"] > max(Kind)) | (spans["axis"] > max(Axis))
        | (spans["flags"] > sum(Flag)),
        "have a name that the header lacks": spans["name"] >= len(header.names),
        "have a peer rank that does not exist": (spans["peer"] < -1) | (spans["peer"] >= header.world_size),
    }  # fmt: skip
    for damage, mask in damages.items():
        if mask.any():
            raise _damage_error(f"{path} is damaged: {int(mask.sum())} of its {len(spans)} records {damage}")


def _damage_error(problem: str) -> DataError:
    return DataError(
        f"{problem}. Copy the file again from the folder trace of its run, or delete it to read the other ranks' files "
        "without it."
    )
