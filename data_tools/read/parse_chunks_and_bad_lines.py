"""Content of a chunk (JSON lines in a buffer, or texts in a list) and the handling of bad lines.

Called by all readers. Each document has an ascending number, its item. Both kinds of content support the same
operations: encode the texts of a key or yield them, yield whole documents, drop documents or copy without them, return
an item's position, and locate bad lines. text_from_json_lines.py states why a line is bad; this file adds its place in
the source.

`BadLines` receives bad lines in input order: it stops, skips or quarantines, and counts by cause. The rejects file has
one JSON object per line: file, line (or row), byte, cause, the bytes left out if that is a whole text file, and in
quarantine the line itself.

`SourceTexts` iterates over all texts of files, to train a tokenizer or for `lmtrain eval`, which need no dataset. The
first bad line raises an error with its place and cause.
"""

from __future__ import annotations

import base64
import heapq
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.read.cut_files_into_chunks import (
    START,
    Buffer,
    Chunk,
    MemoryBudget,
    SizeLimits,
    cut_portions,
    read_lines,
)
from data_tools.read.find_input_files import STDIN, Source
from lmtrain.errors import DataError, join_few, shorten, way
from lmtrain.runtime.files.atomic_files import read_errors
from lmtrain.runtime.files.unreadable_files import encoding_advice
from lmtrain.tokenizer.bulk_encoding import EncodedDocuments, Encoder
from lmtrain.tokenizer.text_from_json_lines import (
    BOM,
    BadTextError,
    Document,
    Reject,
    extract_text,
    parse_document,
    read_jsonl,
    split_lines,
)

# because: a slice with more bad lines than this is not JSON lines, and listing them all would exhaust memory
MAX_BAD_LINES = 100_000
_STEP_BYTES = 1 << 20
ALL_READ = -1
DOCUMENT_ENDS = {"lines": re.compile(rb"\n"), "paragraphs": re.compile(rb"(?:\n[ \t]*\r?)+\n")}  # kind of source
WHOLE_FILE = "whole file: "  # start of the name under which a file that is left out as a whole is counted
_NO_KEY = "no key "  # start of the cause if an object lacks the text's key


@dataclass(frozen=True)
class BadLine:
    """A line, row or file that cannot be used, with its position and the cause."""

    line: int  # number of lines or rows of the chunk before it
    offset: int | None  # offset of the wrong byte in the source's text; None for rows
    cause: str
    content: bytes | None = None
    file_bytes: int | None = None  # the bytes of the file if it is one document, and bad as a whole

    @property
    def kind(self) -> str:
        """The cause without the details that differ from line to line."""
        return self.cause.partition(" (")[0]

    @property
    def counted_as(self) -> str:
        """The name under which it is counted: its kind, and whether a whole file is left out because of it."""
        return self.kind if self.file_bytes is None else f"{WHOLE_FILE}{self.kind}"


class LineList:
    """Documents of a chunk as JSON lines in a buffer. The item, a document's number, is its line's offset in the
    buffer; a dropped line is overwritten with spaces, so offsets stay valid.

    Items that are dropped only in a copy made by `without` can still be located in the original.
    """

    def __init__(self, data: Buffer, start: int, first: int | None = None) -> None:
        self._data, self._start = data, start
        self._first = start if first is None else first  # the first line's offset, before its byte order mark

    @cached_property
    def num_lines(self) -> int:
        """The number of lines, including blank ones."""
        data = self._data
        return _count_newlines(data, 0, len(data)) + (len(data) > 0 and data[-1] != 10)

    def encode(self, encoder: Encoder, key_number: int, key: str, append_eod: bool) -> EncodedDocuments:
        """Encode the texts under `key`, which is the key with this number."""
        return encoder.encode_jsonl(self._data, key, append_eod=append_eod)  # type: ignore[arg-type]

    def texts(self, key_number: int, key: str) -> Iterator[tuple[int, str | Reject]]:
        """Yield (item, text under `key`) of every document, in order; for a bad line, (item, Reject). The item is the
        line's offset in the buffer. `key_number`, the number of the key among all that are read, is used by TextList
        only.
        """
        result = read_jsonl(self._data, key)  # type: ignore[arg-type]
        texts: Iterable[tuple[int, str | Reject]] = zip(result.starts, map(bytes.decode, result.documents), strict=True)
        rejects: Iterable[tuple[int, str | Reject]] = ((reject.item, reject) for reject in result.rejects)
        yield from heapq.merge(texts, rejects, key=itemgetter(0)) if result.rejects else texts

    def documents(self, key: str | None) -> Iterator[tuple[int, Document | Reject]]:
        """Yield (item, JSON object) of every line, in order; for a bad line, (item, Reject). The item is the line's
        offset in the buffer. If a key is given, a line without a text under this key is bad.
        """
        for start, line in split_lines(bytes(self._data)):
            try:
                yield start, parse_document(line, key)
            except BadTextError as error:
                yield start, Reject(start, start + error.offset, error.cause)

    def position(self, item: int) -> int:
        """Return the offset of a line in the source."""
        return self._start + item if item else self._first

    def items(self) -> Iterable[int]:
        """Return the items of all documents, in order."""
        return (start for start, _ in split_lines(bytes(self._data)))

    def drop(self, items: Iterable[int]) -> None:
        """Overwrite the lines at the offsets `items` of the buffer with spaces, so that they are no documents any more.
        """
        for item in items:
            if not isinstance(self._data, bytearray):
                self._data = bytearray(self._data)
            stop = self._line_end(item)
            self._data[item:stop] = b" " * (stop - item)

    def drop_long(self, limits: SizeLimits) -> list[BadLine]:
        """Drop the lines of more than `limits.max_doc_bytes` bytes, and return them as bad lines."""
        if len(self._data) <= limits.max_doc_bytes:
            return []
        ends = np.flatnonzero(np.frombuffer(self._data, np.uint8) == 10)
        starts = np.concatenate(([0], ends + 1))
        ends = np.append(ends, len(self._data))
        long = np.flatnonzero(ends - starts > limits.max_doc_bytes)
        self.drop(starts[long].tolist())
        return [BadLine(int(i), self._start + int(starts[i]), limits.too_long_cause) for i in long]

    def without(self, items: Iterable[int]) -> LineList:
        """Return a copy without the lines at the offsets `items` of the buffer."""
        copy = LineList(bytearray(self._data), self._start)
        copy.drop(items)
        return copy

    def select(self, items: Sequence[int]) -> LineList:
        """Return a copy of these lines only; their items are new."""
        return LineList(b"\n".join(bytes(self._data[item : self._line_end(item)]) for item in items), 0)

    def locate_rejects(self, rejects: Sequence[Reject], keep_content: bool = False) -> list[BadLine]:
        """Return a BadLine for each rejected document: the number of lines before it in the chunk, the offset of the
        wrong byte in the source, the cause and, with `keep_content`, the line itself.
        """
        bad_lines, line, at = [], 0, 0
        for reject in rejects[: MAX_BAD_LINES + 1]:
            line += _count_newlines(self._data, at, reject.item)
            at = reject.item
            content, cause = bytes(self._data[at : self._line_end(at)]), reject.cause
            if cause.startswith(_NO_KEY):
                keys = parse_document(content.removeprefix(BOM), None)
                cause += f" (its keys: {shorten(join_few(map(repr, keys))) or 'none'})"
            bad_lines.append(BadLine(line, self._start + reject.offset, cause, content if keep_content else None))
        return bad_lines

    def _line_end(self, item: int) -> int:
        """Return the offset in the buffer at which the line that begins at `item` ends, before its newline."""
        for offset in range(item, len(self._data), 4096):  # because: a memoryview has no find method
            newline = bytes(self._data[offset : offset + 4096]).find(b"\n")
            if newline >= 0:
                return offset + newline
        return len(self._data)


def _count_newlines(data: Buffer, start: int, stop: int) -> int:
    """Return the number of newlines in data[start:stop]."""
    if not isinstance(data, memoryview):
        return data.count(b"\n", start, stop)
    # because: a memoryview has no count method for bytes
    return sum(bytes(data[at : min(at + _STEP_BYTES, stop)]).count(b"\n") for at in range(start, stop, _STEP_BYTES))


class TextList:
    """Documents of a chunk as rows of texts, one text per key. The item, a document's number, is the number of its row.
    The methods are as in `LineList`.

    `places` has, if a text file is cut into documents, the number of lines before each document in the chunk, and its
    offset in the file.
    """

    def __init__(
        self, rows: Iterable[tuple[Any, ...]], start: int = 0, is_table: bool = False,
        places: Sequence[tuple[int, int]] = (), num_lines: int | None = None,
    ) -> None:  # fmt: skip
        self.rows, self._start, self._is_table = dict(enumerate(rows)), start, is_table
        self._places = places
        self.num_lines = len(self.rows) if num_lines is None else num_lines

    @classmethod
    def cut(cls, text: bytes, start: int, ends: re.Pattern[bytes]) -> TextList:
        """Cut a text into documents at the matches of `ends`; blank documents are left out. `start` is the text's
        offset in its file.
        """
        rows, places, line, at = list[tuple[bytes]](), list[tuple[int, int]](), 0, 0
        for stop, next_at in [*(match.span() for match in ends.finditer(text)), (len(text), len(text))]:
            if document := text[at:stop].strip(b"\r\n"):
                first = text.index(document, at)
                rows += [(document,)] * bool(document.strip())
                places += [(line + text.count(b"\n", at, first), start + first)] * bool(document.strip())
            line, at = line + text.count(b"\n", at, next_at), next_at
        return cls(rows, start, places=places, num_lines=line)

    def encode(self, encoder: Encoder, key_number: int, key: str, append_eod: bool) -> EncodedDocuments:
        items = [item for item, row in self.rows.items() if row[key_number] is not None]
        encoded = encoder.encode_documents([self.rows[item][key_number] for item in items], append_eod=append_eod)
        missing = [Reject(item, 0, f"the value of {key!r} is not text") for item in self.rows.keys() - set(items)]
        rejects = [Reject(items[reject.item], reject.offset, reject.cause) for reject in encoded.rejects]
        return EncodedDocuments(encoded.tokens, encoded.lengths, encoded.num_text_bytes, sorted(missing + rejects))

    def texts(self, key_number: int, key: str) -> Iterator[tuple[int, str | Reject]]:
        for item, row in self.rows.items():
            text = row[key_number]
            try:
                if text is None:
                    raise BadTextError(0, f"the value of {key!r} is not text")
                yield item, extract_text(text, None)
            except BadTextError as error:
                yield item, Reject(item, error.offset, error.cause)

    def documents(self, key: str | None) -> Iterator[tuple[int, Document | Reject]]:
        name = key or "text"
        for item, text in self.texts(0, name):
            yield item, {name: text} if isinstance(text, str) else text

    def position(self, item: int) -> int:
        return self._places[item][1] if self._places else self._start + item

    def items(self) -> Iterable[int]:
        return self.rows.keys()

    def drop(self, items: Iterable[int]) -> None:
        for item in items:
            del self.rows[item]

    def drop_long(self, limits: SizeLimits) -> list[BadLine]:
        most = limits.max_doc_bytes
        # because: UTF-8 takes at most four bytes per character, so shorter texts need not be encoded
        long = [
            item for item, row in self.rows.items()
            if any(
                text and 4 * len(text) > most and len(text.encode() if isinstance(text, str) else text) > most
                for text in row
            )
        ]  # fmt: skip
        bad_lines = self.locate_rejects([Reject(item, 0, limits.too_long_cause) for item in long])
        self.drop(long)
        return bad_lines

    def without(self, items: Iterable[int]) -> TextList:
        dropped = set(items)
        return TextList(row for item, row in self.rows.items() if item not in dropped)

    def select(self, items: Sequence[int]) -> TextList:
        return TextList(self.rows[item] for item in items)

    def locate_rejects(self, rejects: Sequence[Reject], keep_content: bool = False) -> list[BadLine]:
        """Return a BadLine for each rejected document: its row, or for a text file its line and the offset of the wrong
        byte, and the cause. `keep_content` has no effect.
        """
        bad_lines = []
        for item, offset, cause in rejects:
            text = self.rows[item][0]
            has_offset = isinstance(text, bytes) and not self._is_table
            line = text.count(b"\n", 0, offset) if has_offset else item
            if self._places:
                line, offset = line + self._places[item][0], offset + self._places[item][1]
            file_bytes = len(text) if has_offset and not self._places else None
            bad_lines.append(BadLine(line, offset if has_offset else None, cause, file_bytes=file_bytes))
        return bad_lines


Content = LineList | TextList
ChunkBadLines = tuple[list[BadLine], int]  # the bad lines of a chunk, and its number of lines


def read_content(
    chunk: Chunk, limits: SizeLimits, before_long_read: Callable[[], object]
) -> tuple[Content, list[BadLine]]:
    """Return (the documents of a chunk, its bad lines). Bad are lines longer than a document may be; a chunk that could
    not be read counts as one bad line. `before_long_read` is called before a very long line is read, for example to
    take a lock.
    """
    if chunk.problem:
        empty = LineList(b"", chunk.start) if chunk.kind == "jsonl" else TextList([])
        return empty, [BadLine(0, chunk.start, chunk.problem)]
    if chunk.kind != "jsonl":
        texts = _read_texts(chunk, limits)
        return texts, texts.drop_long(limits)
    start, data, long_at = chunk.start, chunk.content, None
    if data is None:
        start, data, long_at = read_lines(chunk.path, chunk.start, chunk.stop, limits, before_long_read)
    skipped = len(BOM) if start == 0 and bytes(data[: len(BOM)]) == BOM else 0
    lines = LineList(data[skipped:] if skipped else data, start + skipped, start)
    bad_lines = lines.drop_long(limits)
    if long_at is not None:
        bad_lines.append(BadLine(lines.num_lines, long_at, limits.too_long_cause))
    return lines, bad_lines


def _read_texts(chunk: Chunk, limits: SizeLimits) -> TextList:
    """Return the documents of a chunk that is not JSON lines: the rows of a .parquet chunk, the whole text of a file,
    or the documents into which a part of a text file is cut.
    """
    if chunk.kind == "parquet":
        return TextList(chunk.rows, chunk.start, is_table=True)
    if chunk.kind == "text":
        if (data := chunk.content) is None:
            with read_errors(chunk.path), open(chunk.path, "rb") as file:
                data = file.read(limits.overlong_bytes)
        return TextList([(bytes(data).removeprefix(BOM),)])
    text = bytes(chunk.content or b"")
    start = len(BOM) if chunk.start == 0 and text.startswith(BOM) else 0
    return TextList.cut(text[start:], chunk.start + start, DOCUMENT_ENDS[chunk.kind])


def collect_bad_lines(chunk: Chunk, content: Content, bad_lines: list[BadLine]) -> ChunkBadLines:
    """Return (bad lines of a chunk sorted by line, the chunk's number of lines). For a byte range of a plain file the
    number is 0, because its lines are counted only if needed. Raise DataError if there are more than MAX_BAD_LINES.
    """
    if len(bad_lines) > MAX_BAD_LINES:
        raise DataError(
            f"{chunk.path} has more than {MAX_BAD_LINES} bad lines near byte {chunk.start}. It is not a {chunk.kind} "
            "file. Give other files."
        )
    return sorted(bad_lines, key=lambda line: line.line), 0 if chunk.plain else content.num_lines + bool(chunk.problem)


# ---- bad lines -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptionNames:
    """The options that messages about bad lines suggest, as the user of a command has to type them."""

    key: str = "--key"
    skip: str | None = "--on-error skip"  # None: there is no such option
    split: str = "--split"
    vocab_size: str = "--vocab-size"


COMMAND_LINE = OptionNames()


class OnError(StrEnum):
    """Action at a bad line."""

    STOP = "stop"
    SKIP = "skip"
    QUARANTINE = "quarantine"


@dataclass
class BadLines:
    """Handler of bad lines; receives the chunks in input order."""

    on_error: OnError
    max_bad: int | None = None
    counts: Counter[str] = field(default_factory=Counter)
    line: int = 0  # lines of the current source read so far
    names: OptionNames = COMMAND_LINE

    def __post_init__(self) -> None:
        self._counter = _LineCounter()

    def add(self, chunk: Chunk, bad_lines: Sequence[BadLine], num_lines: int) -> bytes:
        """Count a chunk's bad lines by cause and return their lines for the rejects file. `num_lines` is the number of
        lines of the chunk. Raise DataError if `on_error` or `max_bad` do not allow a bad line.
        """
        if chunk.start == 0:
            self.line = 0
        before = self._counter.lines_before(chunk.path, chunk.start) if chunk.plain and bad_lines else self.line
        rejects = []
        for bad_line in bad_lines:
            self.counts[bad_line.counted_as] += 1
            line = before + bad_line.line + 1
            self._check(chunk, line, bad_line)
            rejects.append(_reject_line(chunk, line, bad_line))
        self.line += num_lines
        return b"".join(rejects)

    def _check(self, chunk: Chunk, line: int, bad_line: BadLine) -> None:
        """Raise DataError if `on_error` is to stop, or if there are more bad lines than `max_bad`. `line` is the number
        of the line in its file, from 1.
        """
        location = f"{chunk.path}:{line} (byte {bad_line.offset})"
        if chunk.kind == "parquet":
            location = f"{chunk.path}, row {line}"
        if self.on_error is OnError.STOP:
            raise DataError(f"{location}: {bad_line.cause}. {_repair_advice(chunk, bad_line, self.names)}")
        total = self.counts.total()
        if self.max_bad is not None and total > self.max_bad:
            causes = ", ".join(f"{number} {cause}" for cause, number in self.counts.most_common())
            raise DataError(
                f"The input has {total} bad line{'s' * (total > 1)} ({causes}), but --max-bad allows {self.max_bad}. "
                f"The last is {location}. Repair the lines, or allow more with --max-bad."
            )


class _LineCounter:
    """Line numbers by offset in a plain file, counted only when needed: most files have no bad line."""

    def __init__(self) -> None:
        self._path, self._at, self._num_ends = Path(), 0, 0

    def lines_before(self, path: Path, offset: int) -> int:
        """Return how many lines of a plain file begin before the byte `offset`. Efficient if offsets ascend, file by
        file.
        """
        if offset == 0:
            return 0
        if path != self._path or offset - 1 < self._at:
            self._path, self._at, self._num_ends = path, 0, 0
        with read_errors(path), open(path, "rb") as file:
            file.seek(self._at)
            while self._at < offset - 1 and (data := file.read(min(offset - 1 - self._at, _STEP_BYTES))):
                self._num_ends += data.count(b"\n")
                self._at += len(data)
        return self._num_ends + 1


def _repair_advice(chunk: Chunk, bad_line: BadLine, names: OptionNames) -> str:
    """Return a sentence on what to do about a bad line: add an option, by its name in `names`, if probably all lines
    are bad in this way, else repair it, or skip such lines if there is an option for that.
    """
    if bad_line.cause.startswith(_NO_KEY):
        # because: the files before it have another key, if they have any
        each = "; files with different keys need a command each, and `lmtrain data merge` joins datasets"
        return f"Name the key of the text with {names.key}{each if chunk.source else ''}."
    if chunk.kind == "text" and bad_line.kind == "longer than a document may be":
        return f"Make a document of each of its paragraphs: {way(f'{names.split}=blank-line')}."
    if chunk.path == STDIN and bad_line.kind == "not valid JSON":
        return f"If it is plain text, add {way('--format', 'txt')}."
    what = "lines" if bad_line.file_bytes is None else "files, each as a whole"
    alternative = f", or skip such {what}: {way(*names.skip.split())}" if names.skip else ""
    if bad_line.kind == "invalid UTF-8" and chunk.kind != "parquet":
        if chunk.path != STDIN and (conversion := encoding_advice(chunk.path, bad_line.offset or 0)):
            return conversion
        return f"Leave out files that are not text, such as images; in a text, repair or remove the line{alternative}."
    return f"Repair or remove the line{alternative}."


def _reject_line(chunk: Chunk, line: int, bad_line: BadLine) -> bytes:
    """Return the line of the rejects file, a JSON object, for a bad line. `line` is its number in the file, from 1."""
    tree: dict[str, Any] = {"file": str(chunk.path)}
    tree |= {"row": line} if chunk.kind == "parquet" else {"line": line, "byte": bad_line.offset}
    tree["cause"] = bad_line.cause
    if bad_line.file_bytes is not None:
        tree["left_out_bytes"] = bad_line.file_bytes
    if bad_line.content is not None:
        try:
            tree["content"] = bad_line.content.decode()
        except UnicodeDecodeError:
            tree["content_base64"] = base64.b64encode(bad_line.content).decode()
    return json.dumps(tree, ensure_ascii=False).encode() + b"\n"


# ---- all texts of some files -----------------------------------------------------------------------------------------


class SourceTexts:
    """The texts of the sources, iterable repeatedly. `report` receives the bytes read so far, then ALL_READ."""

    def __init__(
        self,
        sources: Sequence[Source],
        key: str,
        limits: SizeLimits | None = None,
        report: Callable[[int], None] = lambda done: None,
        names: OptionNames = COMMAND_LINE,
    ) -> None:
        self._sources, self._key, self._limits, self._report = sources, key, limits or SizeLimits(), report
        self._names = names

    def __iter__(self) -> Iterator[str]:
        return (text for _, text in self.iterate_with_paths())

    def iterate_with_paths(self) -> Iterator[tuple[Path, str]]:
        """Yield (path of the file, text) of each document. Raise DataError at the first bad line."""
        bad_lines, done = BadLines(OnError.STOP, names=replace(self._names, skip=None)), 0
        for portion in cut_portions(self._sources, START, self._limits, (self._key,), MemoryBudget(2**62)):
            for chunk in portion.chunks:
                content, too_long = read_content(chunk, self._limits, lambda: None)
                for _, text in content.texts(0, self._key):
                    if isinstance(text, Reject):
                        bad_lines.add(chunk, content.locate_rejects([text]), 0)
                    else:
                        yield chunk.path, text
                bad_lines.add(chunk, *collect_bad_lines(chunk, content, too_long))
                done += chunk.num_disk_bytes
                self._report(done)
        self._report(ALL_READ)


def refuse_blank_texts(texts: Iterable[str], names: OptionNames = COMMAND_LINE) -> Iterable[str]:
    """Return the texts; if they are an iterator, without the blank ones at its beginning. Raise DataError if all are
    blank, because a tokenizer trained on them would hold only single bytes.
    """
    ahead = iter(texts)
    first = next((text for text in ahead if text.strip()), None)
    if first is None:
        raise DataError(
            "All input texts are empty, so there is nothing to train a tokenizer on. "
            f"Check the files and {names.key}."
        )
    return chain([first], ahead) if ahead is texts else texts
