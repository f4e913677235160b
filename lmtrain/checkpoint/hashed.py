"""Files whose every 4 MiB block has a SHA-256: written in one pass, verified part by part when read. Torch-free.

A file's root is the SHA-256 of its blocks' digests, so that one line of the manifest vouches for all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock

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


def encode_blocks(entry: FileEntry, digests: Sequence[bytes]) -> bytes:
    """The list of blocks that lies beside a tensor file."""
    blocks = {"size": entry.size, "block_bytes": BLOCK_BYTES, "root": entry.root, "blocks": [d.hex() for d in digests]}
    return json.dumps(blocks, indent=0).encode()


def read_hashed(path: Path, entry: FileEntry, limit_bytes: int) -> bytes:
    """A whole small file, verified against its entry."""
    if entry.size > limit_bytes:
        raise CheckpointError(f"{path} has {entry.size} bytes and at most {limit_bytes} are read at once. {_RESTORE}")
    data = _read(path, entry.size, 0, entry.size)
    digests = (hashlib.sha256(data[i : i + BLOCK_BYTES]).digest() for i in range(0, len(data), BLOCK_BYTES))
    if root_of(digests) != entry.root:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's. {_RESTORE}")
    return data


def verify_file(path: Path, entry: FileEntry) -> None:
    """Read a file of any size against its entry alone, block by block."""
    starts = range(0, entry.size, BLOCK_BYTES)
    blocks = (_read(path, entry.size, start, min(BLOCK_BYTES, entry.size - start)) for start in starts)
    if root_of(hashlib.sha256(block).digest() for block in blocks) != entry.root:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's. {_RESTORE}")


class BlockCache:
    """The newest of those verified blocks that were used in part, of any files: a neighbour mostly wants the rest."""

    def __init__(self, num_blocks: int = 1) -> None:
        self._most = num_blocks
        self._blocks: OrderedDict[tuple[Path, int], bytes] = OrderedDict()
        self._lock = Lock()

    def get(self, path: Path, index: int) -> bytes | None:
        with self._lock:
            if (path, index) in self._blocks:
                self._blocks.move_to_end((path, index))
            return self._blocks.get((path, index))

    def put(self, path: Path, index: int, data: bytes) -> None:
        with self._lock:
            self._blocks[path, index] = data
            if len(self._blocks) > self._most:
                self._blocks.popitem(last=False)


class HashedFile:
    """Reads any range of a large file. Each block is verified as it is read and only verified bytes are given out.

    Threads may share it.
    """

    def __init__(self, path: Path, entry: FileEntry, digests: list[bytes], cache: BlockCache | None = None) -> None:
        if len(digests) != -(-entry.size // BLOCK_BYTES) or root_of(digests) != entry.root:
            raise CheckpointError(f"{path} is not the file that its list of blocks describes. {_RESTORE}")
        self.path = path
        self.size = entry.size
        self._digests = digests
        self._cache = cache or BlockCache()

    def read(self, start: int, size: int) -> memoryview:
        """These bytes; the caller asks for ranges inside the file only."""
        if size and start // BLOCK_BYTES == (start + size - 1) // BLOCK_BYTES:
            return self._part(start, size)
        data = bytearray(size)
        self.read_into(start, memoryview(data))
        return memoryview(data)

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out`, flat bytes, with as many bytes from `start` on."""
        assert 0 <= start <= start + len(out) <= self.size
        done = 0
        while done < len(out):
            part = self._part(start + done, min(len(out) - done, BLOCK_BYTES - (start + done) % BLOCK_BYTES))
            out[done : done + len(part)] = part
            done += len(part)

    def verify(self) -> None:
        for index in range(len(self._digests)):
            self._verified(index)

    def _part(self, start: int, size: int) -> memoryview:
        """A range inside one block."""
        assert 0 <= start < start + size <= self.size
        index, at = divmod(start, BLOCK_BYTES)
        data = self._cache.get(self.path, index)
        if data is None:
            data = self._verified(index)
            if size < len(data):
                self._cache.put(self.path, index, data)
        return memoryview(data)[at : at + size]

    def _verified(self, index: int) -> bytes:
        start = index * BLOCK_BYTES
        data = _read(self.path, self.size, start, min(BLOCK_BYTES, self.size - start))
        if hashlib.sha256(data).digest() != self._digests[index]:
            raise CheckpointError(f"{self.path} is damaged in bytes {start} to {start + len(data) - 1}. {_RESTORE}")
        return data


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
