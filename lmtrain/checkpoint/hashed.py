"""Files whose every 4 MiB block has a SHA-256: written in one pass, verified part by part when read. Torch-free.

A file's root is the SHA-256 of its blocks' digests, so that one line of the manifest vouches for all of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from lmtrain.checkpoint.format import BLOCK_BYTES, FileEntry
from lmtrain.errors import CheckpointError, DataError, MissingInputError
from lmtrain.runtime.faults import fault_point
from lmtrain.runtime.files import open_regular, read_errors, read_range

_RESTORE = "Restore it from a copy or use another checkpoint."


class HashedWriter:
    """A new file, hashed while it is written; on leaving the context it is on disk, not only in a cache."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digests: list[bytes] = []
        self._size = 0
        self._hash = hashlib.sha256()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: BLOCK_BYTES - self._size % BLOCK_BYTES]
            self._hash.update(part)
            _write_all(self._fd, part)
            self._size += len(part)
            if self._size % BLOCK_BYTES == 0:
                self._end_block()
            view = view[len(part) :]

    def _end_block(self) -> None:
        self.digests.append(self._hash.digest())
        self._hash = hashlib.sha256()

    def entry(self) -> FileEntry:
        """What the manifest says of this file; known once the context is left."""
        return FileEntry(self._size, root_of(self.digests))

    def __enter__(self) -> HashedWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                if self._size % BLOCK_BYTES:
                    self._end_block()
                os.fsync(self._fd)
        finally:
            os.close(self._fd)


def _write_all(fd: int, part: memoryview) -> None:
    while len(part):
        part = part[os.write(fd, part) :]


def write_hashed(
    path: Path, parts: Iterable[bytes | memoryview], point: str | None = None
) -> tuple[FileEntry, list[bytes]]:
    """Write these parts as one file; gives its entry and its blocks' digests."""
    with HashedWriter(path) as file:
        for part in parts:
            file.write(part)
            if point is not None:
                fault_point(point)
    return file.entry(), file.digests


def root_of(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def read_hashed(path: Path, entry: FileEntry, limit_bytes: int) -> bytes:
    """A whole small file, verified against its entry."""
    if entry.size > limit_bytes:
        raise CheckpointError(f"{path} has {entry.size} bytes and at most {limit_bytes} are read at once. {_RESTORE}")
    data = _read(path, entry.size, 0, entry.size)
    digests = (hashlib.sha256(data[i : i + BLOCK_BYTES]).digest() for i in range(0, len(data), BLOCK_BYTES))
    if root_of(digests) != entry.root:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's. {_RESTORE}")
    return data


class HashedFile:
    """Reads any range of a large file. Each block is verified as it is read and only verified bytes are given out."""

    def __init__(self, path: Path, entry: FileEntry, digests: list[bytes]) -> None:
        if len(digests) != -(-entry.size // BLOCK_BYTES) or root_of(digests) != entry.root:
            raise CheckpointError(f"{path} is not the file that its list of blocks describes. {_RESTORE}")
        self.path = path
        self.size = entry.size
        self._digests = digests
        # because: the next range mostly begins in the block where this one ends
        self._last: tuple[int, bytes] = (-1, b"")

    def read(self, start: int, size: int) -> memoryview:
        """These bytes; the caller asks for ranges inside the file only."""
        assert 0 <= start <= start + size <= self.size
        if not size:
            return memoryview(b"")
        first, last = start // BLOCK_BYTES, (start + size - 1) // BLOCK_BYTES
        if first == last:
            at = start - first * BLOCK_BYTES
            return memoryview(self._block(first))[at : at + size]
        data = b"".join(self._block(i) for i in range(first, last + 1))
        at = start - first * BLOCK_BYTES
        return memoryview(data)[at : at + size]

    def verify(self) -> None:
        for index in range(len(self._digests)):
            self._block(index)

    def _block(self, index: int) -> bytes:
        if self._last[0] != index:
            start = index * BLOCK_BYTES
            data = _read(self.path, self.size, start, min(BLOCK_BYTES, self.size - start))
            if hashlib.sha256(data).digest() != self._digests[index]:
                raise CheckpointError(f"{self.path} is damaged in bytes {start} to {start + len(data) - 1}. {_RESTORE}")
            self._last = (index, data)
        return self._last[1]


def _read(path: Path, expected_size: int, start: int, size: int) -> bytes:
    """A range of a plain file in the checkpoint's folder. Opened for each block, so that no descriptor is held."""
    try:
        with read_errors(path):
            fd, found = open_regular(path, follow_links=False)
            try:
                data = read_range(fd, start, size) if found == expected_size else b""
            finally:
                os.close(fd)
    except (DataError, MissingInputError) as error:
        raise CheckpointError(str(error)) from error
    if found != expected_size or len(data) != size:
        raise CheckpointError(f"{path} has {found} bytes and the manifest says {expected_size}. {_RESTORE}")
    return data
