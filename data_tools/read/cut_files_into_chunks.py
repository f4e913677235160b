"""Cuts the sources into chunks of work, in order, and reads lines of plain files by offset. Called by all readers.

A chunk of a plain .jsonl file is a range of bytes that the worker reads itself; a line belongs to the chunk that
contains its first byte. Sources that can only be read sequentially (archives, pipes) or through a library (.parquet)
are read here and their content is sent with the chunk. Chunk boundaries depend only on the sources and the settings, so
that a resumed run cuts the same chunks. `TaskPart` is task i of n, which reads a byte range of the sources and names
its output files. `MemoryBudget` limits how many bytes of the corpus are in memory at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Condition
from typing import Any, NamedTuple

from data_tools.read.compressed_and_parquet_readers import (
    DamagedArchiveError,
    Rows,
    open_source,
    read_rows,
    read_stream,
)
from data_tools.read.find_input_files import Source
from lmtrain.errors import UsageError
from lmtrain.runtime.files import atomic_files
from lmtrain.tokenizer.text_from_json_lines import BOM

SLICE_BYTES = 4 << 20
MAX_DOC_BYTES = 256 << 20
_MAX_FILES = 1024  # most files in a portion
_BEYOND_BYTES = 64 << 10  # bytes read beyond a slice to find the end of its last line
_SCAN_BYTES = 1 << 20
_MANY_SLICES = 4
_LINE_ENDS = (b"\n",)
_PARAGRAPH_ENDS = (b"\n\n", b"\n\r\n")
Buffer = bytes | bytearray | memoryview
_ContentSpan = tuple[int, int, Buffer | None, str]  # first byte, one past the last, the bytes or None, the problem


class ReadPosition(NamedTuple):
    """Position at which reading continues: the number of a source, and an offset in its text or a row number."""

    source: int = 0
    offset: int = 0


START = ReadPosition()


@dataclass(frozen=True)
class SizeLimits:
    """Size limits of reading, in bytes: of a slice, into which large sources are cut, and of the longest document
    allowed.
    """

    slice_bytes: int = SLICE_BYTES
    max_doc_bytes: int = MAX_DOC_BYTES

    @property
    def overlong_bytes(self) -> int:
        """Bytes from which a line is certainly too long; the worker checks the exact limit."""
        return self.max_doc_bytes + len(BOM) + 1

    @property
    def too_long_cause(self) -> str:
        return f"longer than a document may be ({self.max_doc_bytes} bytes)"


class PartRange(NamedTuple):
    """The byte range of a source that one of several tasks reads."""

    start: int
    stop: int
    is_whole: bool  # whether the part reads the whole source, for a source that can only be read sequentially


@dataclass(frozen=True)
class TaskPart:
    """Task `number` of `count` tasks that share the work on the same sources."""

    number: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> TaskPart:
        """Parse the value of --part, `i/n` for task i of n. Raise UsageError unless 0 <= i < n."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if match is None or int(match[1]) >= int(match[2]):
            raise UsageError(f"--part={text} is not a part. Give i/n, task i of n, with i from 0 to n-1, as in 0/16.")
        return cls(int(match[1]), int(match[2]))

    @property
    def is_whole(self) -> bool:
        """True if this is the only task."""
        return self.count == 1

    def output_path(self, path: Path) -> Path:
        """Return the path for this task's part of an output file: a/b.jsonl becomes a/b.part-00003-of-00016.jsonl."""
        if self.is_whole:
            return path
        stem, dot, rest = path.name.partition(".")
        return path.with_name(f"{stem}.part-{self.number:05d}-of-{self.count:05d}{dot}{rest}")

    def share_of(self, total: int) -> tuple[int, int]:
        """Return (first, one past the last) of this task's share of 0..total-1."""
        return total * self.number // self.count, total * (self.number + 1) // self.count

    def spans(self, sizes: Sequence[int]) -> Iterator[PartRange]:
        """Yield the range that this task reads of each source, given the sources' sizes in bytes. A source that can
        only be read sequentially is read as a whole by the task in whose share it begins.
        """
        first, last = self.share_of(sum(sizes))
        base = 0
        for size in sizes:
            begins_here = first <= base and (base < last or self.number == self.count - 1)
            yield PartRange(max(first - base, 0), min(last - base, size), begins_here)
            base += size


WHOLE_PART = TaskPart()


@dataclass
class Chunk:
    """A unit of a worker's input: a byte range of a file that the worker reads, or content that was read here."""

    source: int
    path: Path
    kind: str  # a Source's kind
    start: int
    stop: int
    num_bytes: int  # bytes that it takes from the budget
    content: Buffer | None = None  # the content, if a worker cannot read it itself
    rows: Rows = field(default_factory=list)
    problem: str = ""  # why there is no content
    plain: bool = False  # a byte range of a file that the worker reads
    num_disk_bytes: int = 0  # for the progress report

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling; a memoryview cannot be pickled and is copied to bytes."""
        return self.__dict__ | {"content": None if self.content is None else bytes(self.content)}

    @property
    def next(self) -> ReadPosition:
        """The position in the input at which reading continues after this chunk."""
        return ReadPosition(self.source + 1) if self.kind == "text" else ReadPosition(self.source, self.stop)


@dataclass
class Portion:
    """Work that one worker processes at a time: one large chunk, or several small chunks of the same kind."""

    chunks: list[Chunk]

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)

    def fits(self, chunk: Chunk, limits: SizeLimits) -> bool:
        """Return True if the chunk can be added to this portion: all chunks have the same kind, at most
        `limits.slice_bytes` bytes in total, and their number is within the limit. An empty portion takes any chunk.
        """
        return not self.chunks or (
            chunk.kind == self.chunks[0].kind
            and self.num_bytes + chunk.num_bytes <= limits.slice_bytes
            and len(self.chunks) < _MAX_FILES
        )


def cut_portions(
    sources: Sequence[Source], position: ReadPosition, limits: SizeLimits, keys: Sequence[str], budget: MemoryBudget,
    part: TaskPart = WHOLE_PART,
) -> Iterator[Portion]:  # fmt: skip
    """Yield the content of the sources from `position` on, in order, as portions that one worker processes at a time;
    with `part`, only the share of that task of a job array. `keys` are the columns to read of .parquet files. Bytes are
    acquired from `budget` before they are held or yielded, which can block.
    """
    portion = Portion([])
    spans = list(part.spans([source.num_bytes for source in sources]))
    for source_number in range(position.source, len(sources)):
        start = position.offset if source_number == position.source else 0
        for chunk in _cut_source(
            source_number, sources[source_number], start, spans[source_number], limits, keys, budget
        ):
            if not portion.fits(chunk, limits):
                yield portion
                portion = Portion([])
            portion.chunks.append(chunk)
    if portion.chunks:
        yield portion


def _cut_source(
    source_number: int, source: Source, start: int, span: PartRange, limits: SizeLimits, keys: Sequence[str],
    budget: MemoryBudget,
) -> Iterator[Chunk]:  # fmt: skip
    """Yield the chunks of source number `source_number` from `start` (a byte offset or row) on, within `span`, the
    range that the task reads. `keys` are the columns to read of a .parquet file.
    """
    if source.kind == "jsonl" and not source.streamed:
        for begin in range(max(start, span.start), span.stop, limits.slice_bytes):
            size = min(limits.slice_bytes, span.stop - begin)
            budget.acquire(size)
            yield Chunk(source_number, source.path, "jsonl", begin, begin + size, size, num_disk_bytes=size, plain=True)
    elif not span.is_whole:
        return
    elif source.kind == "parquet":
        yield from _parquet_chunks(source_number, source, start, limits, keys, budget)
    elif source.streamed:
        yield from _stream_chunks(source_number, source, start, limits, budget)
    else:
        size = source.num_bytes
        problem = limits.too_long_cause if size >= limits.overlong_bytes else ""
        num_bytes = 0 if problem else size
        budget.acquire(num_bytes)
        yield Chunk(source_number, source.path, "text", 0, size, num_bytes, problem=problem, num_disk_bytes=size)


def _parquet_chunks(
    source_number: int, source: Source, start: int, limits: SizeLimits, keys: Sequence[str], budget: MemoryBudget
) -> Iterator[Chunk]:
    """Yield chunks of rows of a .parquet file from row `start` on, each with about `limits.slice_bytes` of text. `keys`
    are the columns to read.
    """
    reported = 0
    for at, rows, num_bytes, share in read_rows(source.path, keys, start, limits.slice_bytes):
        budget.acquire(num_bytes)
        done = int(share * source.num_bytes)
        if at == start:  # an earlier run has reported what is before
            reported = done * start // (at + len(rows))
        yield Chunk(
            source_number, source.path, "parquet", at, at + len(rows), num_bytes, rows=rows,
            num_disk_bytes=done - reported,
        )  # fmt: skip
        reported = done


def _stream_chunks(
    source_number: int, source: Source, start: int, limits: SizeLimits, budget: MemoryBudget
) -> Iterator[Chunk]:
    """Yield chunks of a source that can only be read sequentially: whole lines or paragraphs, about
    `limits.slice_bytes` each, or the whole text. Chunks that end at or before the offset `start` are left out.
    """
    reported = 0
    with open_source(source) as file:
        ends = _PARAGRAPH_ENDS if source.kind == "paragraphs" else _LINE_ENDS
        cutter = _read_whole_text if source.kind == "text" else partial(_cut_documents, ends=ends)
        for begin, stop, content, problem in cutter(read_stream(file, source.codec), limits, budget):
            done = min(file.tell(), source.num_bytes) if source.num_bytes else 0
            num_bytes = len(content) if content is not None else 0
            if stop <= start:
                budget.release(num_bytes)
                reported = done  # by an earlier run
                continue
            yield Chunk(
                source_number, source.path, source.kind, begin, stop, num_bytes, content, [], problem,
                num_disk_bytes=done - reported,
            )  # fmt: skip
            reported = done


def _cut_documents(
    stream: Iterator[bytes], limits: SizeLimits, budget: MemoryBudget, ends: Sequence[bytes]
) -> Iterator[_ContentSpan]:
    """Cut a stream into spans of whole documents, about `limits.slice_bytes` each, and yield (start, stop, bytes,
    problem). `ends` are the byte sequences with which a document ends, such as a newline. A document that is too long,
    and the rest of a damaged stream, are spans with a problem and None for the bytes.
    """
    pending, start, num_complete = bytearray(), 0, 0  # held bytes, their offset, and how many are whole documents
    long_from, damage = -1, ""  # start of an overlong document that is being skipped; why the stream ended early
    overlap = max(map(len, ends)) - 1  # bytes of an end that may lie in the data before
    skipped = b""  # the last bytes of an overlong document, in which its end may begin
    for data, cause in _catch_damage(stream):
        damage = cause
        if long_from >= 0:
            data, before = skipped + data, len(skipped)
            end = min((at + len(mark) for mark in ends if (at := data.find(mark)) >= 0), default=0)
            start += (end or len(data)) - before
            if not end:
                skipped = data[len(data) - overlap :] if overlap else b""
                continue
            yield long_from, start, None, limits.too_long_cause
            long_from, skipped, data = -1, b"", data[end:]
        budget.acquire(len(data))
        searched = max(len(pending) - overlap, num_complete)
        pending += data
        end = max(at + len(mark) if (at := pending.rfind(mark, searched)) >= 0 else 0 for mark in ends)
        num_complete = end or num_complete
        is_overlong = len(pending) - num_complete >= limits.overlong_bytes
        if num_complete >= limits.slice_bytes or (num_complete and is_overlong):
            rest = pending[num_complete:]
            yield start, start + num_complete, memoryview(pending)[:num_complete], ""
            pending, start, num_complete = rest, start + num_complete, 0
        if is_overlong:
            budget.release(len(pending))
            skipped = bytes(pending[len(pending) - overlap :]) if overlap else b""
            long_from, pending, start = start, bytearray(), start + len(pending)
    if long_from >= 0:
        yield long_from, start, None, limits.too_long_cause
    if damage:  # the last document is incomplete
        budget.release(len(pending) - num_complete)
        pending = pending[:num_complete]
    if pending:
        yield start, start + len(pending), pending, ""
    if damage:
        yield start + len(pending), start + len(pending) + 1, None, damage


def _read_whole_text(stream: Iterator[bytes], limits: SizeLimits, budget: MemoryBudget) -> Iterator[_ContentSpan]:
    """Yield the whole text of a stream as one span (0, stop, bytes, problem). If it is too long or damaged, the bytes
    are None and the problem says why.
    """
    text, problem = bytearray(), ""
    for data, problem in _catch_damage(stream):
        budget.acquire(len(data))
        text += data
        if len(text) >= limits.overlong_bytes:
            problem = limits.too_long_cause
            break
    if problem:
        budget.release(len(text))
    yield 0, len(text) + 1, None if problem else text, problem


def _catch_damage(stream: Iterator[bytes]) -> Iterator[tuple[bytes, str]]:
    """Yield (data, "") for each piece of a stream. If reading raises DamagedArchiveError, yield (b"", its message) and
    end.
    """
    try:
        for data in stream:
            yield data, ""
    except DamagedArchiveError as error:
        yield b"", str(error)


# ---- lines of a plain file, by position


class FileLines(NamedTuple):
    """Whole lines of a plain file, and the offset of the first."""

    start: int
    data: Buffer
    long_at: int | None  # start of the line after them if that line is too long to be read


def read_lines(
    path: Path, start: int, stop: int, limits: SizeLimits, before_long_read: Callable[[], object]
) -> FileLines:
    """Return the lines of a plain file that begin at bytes start to stop - 1. `before_long_read` is called before much
    more than `limits.slice_bytes` is read because of a long line, for example to take a lock.
    """
    with atomic_files.read_errors(path), atomic_files.open_fd(path) as (fd, size):
        stop = min(stop, size)
        base = max(start - 1, 0)  # because: the byte before `start` decides whether a line begins there
        data = atomic_files.read_range(fd, base, min(stop + _BEYOND_BYTES, size) - base)
        first = data.find(b"\n", 0, stop - start) + 1 if start else 0
        if start and not first:
            return FileLines(start, b"", None)
        end = data.find(b"\n", stop - 1 - base) + 1
        if end or base + len(data) >= size:
            return FileLines(base + first, memoryview(data)[first : end or len(data)], None)
        last = max(data.rfind(b"\n", first, stop - base) + 1, first)  # start of the line whose end is not in `data`
        line_end = _find_line_end(fd, base + len(data), min(base + last + limits.overlong_bytes, size))
        if line_end is None and base + last + limits.overlong_bytes <= size:
            return FileLines(base + first, memoryview(data)[first:last], base + last)
        end_of_lines = size if line_end is None else line_end
        del data
        if end_of_lines - base > _MANY_SLICES * limits.slice_bytes:
            before_long_read()
        lines = atomic_files.read_range(fd, base + first, end_of_lines - base - first)
        return FileLines(base + first, memoryview(lines), None)  # because: a slice of bytes would be a copy


def _find_line_end(fd: int, offset: int, stop: int) -> int | None:
    """Return the offset after the first newline in bytes offset to stop - 1 of the open file `fd`; None if there is
    none.
    """
    while offset < stop:
        data = os.pread(fd, min(_SCAN_BYTES, stop - offset), offset)
        if not data:
            return None
        if (newline := data.find(b"\n")) >= 0:
            return offset + newline + 1
        offset += len(data)
    return None


# ---- memory budget


class StoppedError(Exception):
    """Raised in the reader when the run is over."""


class MemoryBudget:
    """Limit on the bytes of text in memory: those that the reader holds, and those in flight, which the reader has
    handed on to the consumer.

    The reader may exceed the limit while nothing is in flight, so that a long document passes.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._acquired = self._in_flight = 0  # bytes acquired and not released; those of them in flight
        self._stopped = False
        self._changed = Condition()

    def acquire(self, num_bytes: int) -> None:
        """Take num_bytes from the memory budget. If fewer are free, wait for the consumer to release some; if it holds
        none, take them at once, although the budget is exceeded. Raise StoppedError after `stop` was called.
        """
        with self._changed:
            while not self._stopped and self._in_flight and self._acquired + num_bytes > self._num_bytes:
                self._changed.wait()
            if self._stopped:
                raise StoppedError
            self._acquired += num_bytes

    def release(self, num_bytes: int) -> None:
        """Give num_bytes back to the memory budget. For bytes that the reader acquired but did not hand on to the
        consumer; for those handed on, call `release_in_flight`.
        """
        with self._changed:
            self._acquired -= num_bytes
            self._changed.notify()

    def mark_in_flight(self, num_bytes: int) -> None:
        """Mark acquired bytes as in flight: the consumer now holds them and releases them."""
        with self._changed:
            self._in_flight += num_bytes

    def release_in_flight(self, num_bytes: int) -> None:
        """Give num_bytes back to the memory budget. For bytes that the reader had handed on to the consumer, which is
        done with them.
        """
        with self._changed:
            self._in_flight -= num_bytes
            self.release(num_bytes)

    def stop(self) -> None:
        """Make every call of `acquire`, those that wait and all later ones, raise StoppedError."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
