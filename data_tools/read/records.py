"""JSON lines by position: which lines a part of the work owns, read strictly, with bad ones stopped at or counted.

Called by the runner of corpus steps. A document's position is its file's number and its line's first byte, one
integer that grows along the inputs, so that every task knows it without having read what comes before. Compressed
files are read as streams, with a limit on what they may grow to.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from data_tools.read.streams import DamagedArchiveError, read_stream
from lmtrain.errors import DataError, MissingInputError, UsageError
from lmtrain.runtime.files import read_errors
from lmtrain.units import format_bytes

Document = dict[str, Any]

BLOCK_BYTES = 8 << 20
MAX_DOC_BYTES = 64 << 20
OFFSET_BITS = 44  # of a position: files of up to 16 TiB, and a million of them
# because: text shrinks three- to tenfold, and to a fiftieth where it is a table; deflate's bombs reach 1032
MAX_RATIO, ALWAYS_ALLOWED_BYTES = 200, 64 << 20
SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz", ".jsonl.bz2", ".jsonl.xz", ".jsonl.zst", ".json.zst")
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Reading:
    """How lines are read: the text's key, what happens at a bad line, how long one may be."""

    key: str = "text"  # empty: documents need no text of their own
    on_error: str = "stop"  # or "skip"
    max_doc_bytes: int = MAX_DOC_BYTES


@dataclass(frozen=True)
class Part:
    """Task `number` of `count`."""

    number: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if match is None or int(match[1]) >= int(match[2]):
            raise UsageError(f"--part={text} is not a part. Give i/n with i from 0 to n-1, such as 0/16.")
        return cls(int(match[1]), int(match[2]))

    @property
    def whole(self) -> bool:
        return self.count == 1

    def name(self, path: Path) -> Path:
        """Where this part of a file goes: a/b.jsonl -> a/b.part-00003-of-00016.jsonl."""
        if self.whole:
            return path
        stem, dot, rest = path.name.partition(".")
        return path.with_name(f"{stem}.part-{self.number:05d}-of-{self.count:05d}{dot}{rest}")

    def range(self, total: int) -> tuple[int, int]:
        return total * self.number // self.count, total * (self.number + 1) // self.count


WHOLE = Part()


@dataclass(frozen=True)
class Block:
    """Lines that one worker reads: bytes start to stop of a plain file, or whole lines of a compressed one."""

    path: Path
    file: int
    start: int
    stop: int
    data: bytes | None = None
    too_long: bool = False  # the line at `start` is, and was passed over


def find_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files that these files, folders and globs stand for, in the order given, folders and globs sorted."""
    found: list[Path] = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            matches = sorted(p for p in path.rglob("*") if p.name.endswith(SUFFIXES) and not p.name.startswith("."))
        else:
            matches = [path] if path.exists() else sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        wrong = [p for p in matches if not p.name.endswith(SUFFIXES)]
        if wrong:
            raise UsageError(f"{wrong[0]} is none of {', '.join(SUFFIXES)}. Make JSON lines of it first.")
        if not matches:
            raise MissingInputError(f"{given} does not exist or holds no JSON lines. Check the path.")
        found += matches
    if not found:
        raise UsageError("No input was given. Give .jsonl files, folders of them, or globs.")
    if len({p.resolve() for p in found}) < len(found):
        raise UsageError("An input is given more than once. Give every file once.")
    return found


def cut(files: Sequence[Path], part: Part, reading: Reading, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """This part's lines, in blocks. A line belongs to the part and block that its first byte is in.

    A compressed file cannot be entered in the middle: all its lines belong to the part that its first byte is in.
    """
    with read_errors(files[0]):
        sizes = [path.stat().st_size for path in files]
    first, last = part.range(sum(sizes))
    base = 0
    for number, (path, size) in enumerate(zip(files, sizes, strict=True)):
        if path.suffix != ".jsonl":
            if first <= base < last:
                yield from _stream(path, number, reading.max_doc_bytes, block_bytes)
        else:
            begin, end = max(first - base, 0), min(last - base, size)
            for start in range(begin, end, block_bytes):
                yield Block(path, number, start, min(start + block_bytes, end))
        base += size


def read_block(block: Block, reading: Reading, bad_lines: Callable[[str], None]) -> Iterator[tuple[int, Document]]:
    """The documents of a block with their positions; a bad line stops, or is counted by its cause and left out."""
    for at, line in _lines_of(block, reading.max_doc_bytes):
        if line is not None and not line.strip():
            continue
        try:
            document = _parse(line, reading)
        except BadLine as error:
            if reading.on_error == "stop":
                raise DataError(
                    f"{_where(block, at)}: {error}. Repair the line, or add --on-error skip to leave such lines out."
                ) from error
            bad_lines(f"bad line: {error}")
            continue
        yield block.file << OFFSET_BITS | at, document


def to_line(document: Document) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(", ", ": ")).encode() + b"\n"


class BadLine(ValueError):
    """The cause, in words that are the same for all lines with this fault."""


def _parse(line: bytes | None, reading: Reading) -> Document:
    if line is None:
        raise BadLine(f"longer than {format_bytes(reading.max_doc_bytes)}")
    try:
        document = json.loads(line.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise BadLine("invalid UTF-8") from error
    except BadLine:
        raise
    except RecursionError as error:
        raise BadLine("nests too deeply") from error
    except ValueError as error:  # numbers of thousands of digits among them
        raise BadLine("not valid JSON") from error
    if not isinstance(document, dict):
        raise BadLine("not a JSON object")
    if reading.key and not isinstance(document.get(reading.key), str):
        raise BadLine(f"no text under the key {reading.key!r}")
    if b"\\u" in line and _SURROGATE.search(json.dumps(document, ensure_ascii=False)):
        raise BadLine("a lone surrogate, which is no character")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> Document:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise BadLine("a key stands twice")
    return result


def _no_constant(name: str) -> None:
    raise BadLine(f"{name} is no JSON")


def _where(block: Block, offset: int) -> str:
    if block.data is not None:
        return f"{block.path} (byte {offset} of its content)"
    number, left = 1, offset  # counted only now: a worker that reads the middle of a file does not know it
    with open(block.path, "rb") as file:
        while left > 0 and (data := file.read(min(left, 1 << 20))):
            number += data.count(b"\n")
            left -= len(data)
    return f"{block.path}:{number} (byte {offset})"


def _lines_of(block: Block, limit: int) -> Iterator[tuple[int, bytes | None]]:
    if block.too_long:
        yield block.start, None
    elif block.data is not None:
        yield from numbered(io.BytesIO(block.data), block.start, limit)
    else:
        with read_errors(block.path), open(block.path, "rb") as file:
            at = block.start
            if at:
                file.seek(at - 1)
                at += _skip_line(file, limit) - 1  # the rest of a line that began before
            for offset, line in numbered(file, at, limit):
                if offset >= block.stop:
                    return
                yield offset, line


def numbered(file: IO[bytes], at: int, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines, which end at a newline byte alone, with the offsets of their first bytes; None for one over `limit`."""
    while line := file.readline(limit + 1):
        start, at = at, at + len(line)
        if len(line) > limit:
            at += 0 if line.endswith(b"\n") else _skip_line(file, limit)
            yield start, None
        else:
            yield start, line.removeprefix(_BOM) if start == 0 else line


def _skip_line(file: IO[bytes], limit: int) -> int:
    skipped = 0
    while line := file.readline(limit):
        skipped += len(line)
        if line.endswith(b"\n"):
            break
    return skipped


def _stream(path: Path, number: int, limit: int, block_bytes: int) -> Iterator[Block]:
    lines: list[bytes] = []
    start = held = 0
    with open_compressed(path) as file:
        for at, line in numbered(file, 0, limit):
            if line is not None:
                start = start if lines else at
                lines.append(line)
                held += len(line)
            if lines and (held >= block_bytes or line is None):
                yield Block(path, number, start, start + held, b"".join(lines))
                lines, held = [], 0
            if line is None:
                yield Block(path, number, at, at, b"", too_long=True)
    if lines:
        yield Block(path, number, start, start + held, b"".join(lines))


class Capped(io.RawIOBase):
    """A stream that is refused once it has given more bytes than its source could honestly hold."""

    def __init__(self, inner: IO[bytes], path: Path, limit_bytes: int) -> None:
        self._inner, self._path, self._left = inner, path, limit_bytes

    def readable(self) -> bool:
        return True

    def buffered(self) -> IO[bytes]:
        return io.BufferedReader(self, 1 << 20)

    def readinto(self, buffer: Any) -> int:
        data = self._inner.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise DataError(f"{self._path} unpacks to over {MAX_RATIO} times its size, as no text does.")
        buffer[: len(data)] = data
        return len(data)


class _Pieces:
    """Pieces of bytes, read as from a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._left = pieces, b""

    def read(self, size: int) -> bytes:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._left = piece
        taken, self._left = self._left[:size], self._left[size:]
        return taken


_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda raw: _Pieces(read_stream(raw, "zst")),
}


@contextmanager
def open_compressed(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked if its name says so; damage and bombs are errors that name it."""
    with read_errors(path), open(path, "rb") as raw:
        opener = _OPENERS.get(path.suffix)
        if opener is None:
            yield raw
            return
        limit = max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * path.stat().st_size)
        with unpack_errors(path):
            yield Capped(opener(raw), path, limit).buffered()


@contextmanager
def unpack_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, DamagedArchiveError) as error:
        raise DataError(f"{path} is cut short or damaged ({error}). Get it again.") from error
    except OSError as error:
        if error.errno is None:  # bz2 says "Invalid data stream" in this way
            raise DataError(f"{path} is cut short or damaged ({error}). Get it again.") from error
        raise
