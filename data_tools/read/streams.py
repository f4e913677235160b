"""Compressed files and pipes as chunks of bytes, whatever is in them. Called by pieces.py.

An archive may be hostile: a few kilobytes that stand for gigabytes are found out after 64 MiB, and no chunk is ever
larger than the input can make one step of the decompressor. An archive that ends too early is damaged, not short.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from data_tools.read.sources import STDIN, Source
from lmtrain.errors import UsageError
from lmtrain.runtime.files import read_errors

# because: text shrinks three- to tenfold, logs to a fiftieth; zeros to a thousandth (gz) or a ten-thousandth (zst)
MAX_RATIO = 250
ALWAYS_ALLOWED_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
_GZ_FEED_BYTES = 64 << 10
# because: four bytes of a zst file can stand for 128 KiB, and the library hands out all that it was fed
_ZST_FEED_BYTES = 2 << 10
_ZST_WINDOW_BYTES = 128 << 20  # as the zstd command allows


class DamagedArchiveError(Exception):
    """Raised in the middle of a stream; the message is the cause."""


@contextmanager
def opened(source: Source) -> Iterator[IO[bytes]]:
    if source.path == STDIN:
        # because: a thread that waits in a buffered read holds its lock, and the process could not end before it
        yield getattr(sys.stdin.buffer, "raw", sys.stdin.buffer)
        return
    with read_errors(source.path), open(source.path, "rb") as file:
        yield file


def read_stream(file: IO[bytes], codec: str) -> Iterator[bytes]:
    """The content of an open source in order. Raises DamagedArchiveError after what could be read."""
    if not codec:
        while data := _read_full(file):
            yield data
        return
    num_bytes = 0
    for chunk in (_gunzip if codec == "gz" else _unzstd)(file):
        num_bytes += len(chunk)
        if num_bytes > max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * file.tell()):
            raise DamagedArchiveError(f"the archive grows to more than {MAX_RATIO} times its size")
        yield chunk


def _read_full(file: IO[bytes]) -> bytes:
    """A whole chunk, for a pipe gives what it has: where pieces end must not hang on that."""
    parts, missing = [], CHUNK_BYTES
    while missing and (data := file.read(missing)):
        parts.append(data)
        missing -= len(data)
    return b"".join(parts)


def _gunzip(file: IO[bytes]) -> Iterator[bytes]:
    data, part = file.read(_GZ_FEED_BYTES), zlib.decompressobj(31)
    if not data:
        raise DamagedArchiveError("the archive is cut short")
    while data:
        try:
            yield part.decompress(data, CHUNK_BYTES)
            while not part.eof and part.unconsumed_tail:
                yield part.decompress(part.unconsumed_tail, CHUNK_BYTES)
            data = part.unused_data or file.read(_GZ_FEED_BYTES)
            while not part.eof and not data and (rest := part.decompress(b"", CHUNK_BYTES)):
                yield rest
        except zlib.error as error:
            raise DamagedArchiveError(f"the archive is damaged ({error})") from error
        if part.eof:  # archives may follow each other, and zeros the last
            data = data.lstrip(b"\0")
            while not data and (more := file.read(_GZ_FEED_BYTES)):
                data = more.lstrip(b"\0")
            part = zlib.decompressobj(31) if data else part
    if not part.eof:
        raise DamagedArchiveError("the archive is cut short")


def _unzstd(file: IO[bytes]) -> Iterator[bytes]:
    zstandard = _zstandard()
    build: Callable[[], Any] = zstandard.ZstdDecompressor(max_window_size=_ZST_WINDOW_BYTES).decompressobj
    part, data = build(), file.read(_ZST_FEED_BYTES)
    if not data:
        raise DamagedArchiveError("the archive is cut short")
    held: list[bytes] = []
    while data:
        try:
            held.append(part.decompress(data))
        except zstandard.ZstdError as error:
            yield b"".join(held)
            raise DamagedArchiveError(f"the archive is damaged ({error})") from error
        if sum(map(len, held)) >= CHUNK_BYTES:
            yield b"".join(held)
            held = []
        data = (part.unused_data if part.eof else b"") or file.read(_ZST_FEED_BYTES)
        if part.eof and data:
            part = build()
    yield b"".join(held)
    if not part.eof:
        raise DamagedArchiveError("the archive is cut short")


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        way = "Install it with `pip install 'lmtrain[zst]'`."
        raise UsageError(f".zst files need the package zstandard. {way}") from error
    return zstandard
