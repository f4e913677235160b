"""Files whose every 4 MiB block has a SHA-256: written in one pass, verified part by part when read. Torch-free.

A file's root is the SHA-256 of its blocks' digests, so that one line of the manifest vouches for all of them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from lmtrain.checkpoint.disk.format import BLOCK_BYTES, FileEntry
from lmtrain.errors import CheckpointError, DataError, MissingInputError
from lmtrain.runtime.files.files import open_fd, read_errors, read_range
from lmtrain.runtime.processes.faults import fault_point

WRITERS = 4  # threads that hash and write: more than a disk needs, since one core hashes 0.4 to 1.8 GB/s
MOST_BLOCKS = 8  # copied and not written yet
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_RESTORE = "Restore it from a copy or use another checkpoint."


class HashedWriter:
    """A new file, hashed while it is written; on leaving the context it is on disk, not only in a cache.

    Every whole block is hashed and written by one of a few threads, past the system's cache where the file system
    can: that saves a copy, starts the disk at once, and leaves the cache to the run's data.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digests: list[bytes] = []  # all of them once the context is left
        self._size = 0
        self._block = _aligned(BLOCK_BYTES)
        self._jobs: deque[tuple[Future[bytes], Bytes]] = deque()
        self._pool = ThreadPoolExecutor(WRITERS, "checkpoint-block")  # begins no thread before there is a whole block
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._opened = [self._fd]

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            at = self._size % BLOCK_BYTES
            part = np.frombuffer(view[: BLOCK_BYTES - at], np.uint8)
            self._block[at : at + len(part)] = part
            self._size += len(part)
            if self._size % BLOCK_BYTES == 0:
                self._end_block()
            view = view[len(part) :]

    def _end_block(self) -> None:
        if self._size == BLOCK_BYTES:
            # because: not every system has the flag (macOS), nor does every file system know it
            with suppress(OSError, AttributeError):
                self._opened.append(os.open(self.path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC))
        job = self._pool.submit(self._put, self._block, self._size - BLOCK_BYTES, self._opened[-1])
        self._jobs.append((job, self._block))
        if len(self._jobs) < MOST_BLOCKS:
            self._block = _aligned(BLOCK_BYTES)
        else:
            job, self._block = self._jobs.popleft()
            self.digests.append(job.result())

    def _put(self, block: Bytes, start: int, fd: int) -> bytes:
        digest, left = hashlib.sha256(block.data).digest(), block.data
        while len(left):
            try:
                left = left[os.pwrite(fd, left, start + len(block) - len(left)) :]
            except OSError as error:
                if error.errno != errno.EINVAL or fd == self._fd:
                    raise
                fd = self._fd  # because: some want multiples of more than a page, or the rest of a short write is odd
        return digest

    def entry(self) -> FileEntry:
        """Return the manifest's entry of this file, known once the context is left."""
        return FileEntry(self._size, root_of(self.digests))

    def __enter__(self) -> HashedWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.digests += [job.result() for job, _ in self._jobs]
                if rest := self._size % BLOCK_BYTES:
                    self.digests.append(self._put(self._block[:rest], self._size - rest, self._fd))
                os.fsync(self._fd)
        finally:
            self._pool.shutdown(cancel_futures=True)
            for fd in self._opened:
                os.close(fd)


def _aligned(num_bytes: int) -> Bytes:
    """Memory at the beginning of a page, as writing past the cache asks for."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def write_hashed(
    path: Path, parts: Iterable[bytes | memoryview], point: str | None = None
) -> tuple[FileEntry, list[bytes]]:
    """Write these parts as one file; returns its entry and its blocks' digests."""
    with HashedWriter(path) as file:
        for part in parts:
            file.write(part)
            if point is not None:
                fault_point(point)
    return file.entry(), file.digests


def root_of(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def encode_blocks(entry: FileEntry, digests: Sequence[bytes]) -> bytes:
    """Return the list of block hashes that lies beside a tensor file, as JSON."""
    blocks = {"size": entry.size, "block_bytes": BLOCK_BYTES, "root": entry.root, "blocks": [d.hex() for d in digests]}
    return json.dumps(blocks, indent=0).encode()


def read_hashed(path: Path, entry: FileEntry, limit_bytes: int) -> bytes:
    """Return a whole small file, verified against its entry."""
    if entry.size > limit_bytes:
        raise CheckpointError(f"{path} has {entry.size} bytes and at most {limit_bytes} are read at once. {_RESTORE}")
    data = _read(path, entry.size, 0, entry.size)
    _check_root(path, entry, (data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)))
    return data


def verify_file(path: Path, entry: FileEntry) -> None:
    """Read a file of any size against its entry alone, block by block."""
    _check_root(path, entry, (
        _read(path, entry.size, at, min(BLOCK_BYTES, entry.size - at)) for at in range(0, entry.size, BLOCK_BYTES)
    ))  # fmt: skip


def _check_root(path: Path, entry: FileEntry, blocks: Iterable[bytes]) -> None:
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
        self.path, self.size = path, entry.size
        self._digests, self._cache = digests, cache or BlockCache()

    def read(self, start: int, size: int) -> memoryview:
        """Return a range of verified bytes, which must lie inside the file."""
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
        """Return a range inside one block."""
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
    """Read a range of a plain file, which is opened for each block, so that no descriptor is held."""
    try:
        with read_errors(path), open_fd(path, follow_links=False) as (fd, found):
            data = read_range(fd, start, size) if found == expected_size else b""
    except (DataError, MissingInputError) as error:
        raise CheckpointError(str(error)) from error
    if found != expected_size or len(data) != size:
        raise CheckpointError(f"{path} has {found} bytes and the manifest says {expected_size}. {_RESTORE}")
    return data
