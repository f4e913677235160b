"""Files with a SHA-256 for every 4 MiB block: written in one pass, verified block by block when read. Torch-free.

A file's root hash is the SHA-256 of its blocks' digests, so that one line of the manifest protects all of them.
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

from lmtrain.checkpoint.disk.checkpoint_format import BLOCK_BYTES, FileEntry
from lmtrain.errors import CheckpointError, DataError, MissingInputError
from lmtrain.runtime.files.atomic_files import open_fd, read_errors, read_range
from lmtrain.runtime.processes.fault_injection import fault_point

NUM_THREADS = 4  # that hash and write: more than a disk needs, since one core hashes 0.4 to 1.8 GB/s
MAX_PENDING_BLOCKS = 8  # copied but not yet written
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_RESTORE = "Restore it from a copy or use another checkpoint."


class HashedWriter:
    """Writes a new file and hashes it block by block; when the context ends, the file is on disk, not only in a cache.

    Every full block is hashed and written by one of a few threads, with O_DIRECT if the file system supports it: that
    saves a copy, starts the disk at once, and leaves the page cache to the run's data.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digests: list[bytes] = []  # of all blocks once the context has ended
        self._size = 0
        self._block = _page_aligned(BLOCK_BYTES)
        self._jobs: deque[tuple[Future[bytes], Bytes]] = deque()
        self._pool = ThreadPoolExecutor(NUM_THREADS, "checkpoint-block")  # starts its threads with the first full block
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._fds = [self._fd]

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
            # because: not every system has the flag (macOS), and not every file system supports it
            with suppress(OSError, AttributeError):
                self._fds.append(os.open(self.path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC))
        job = self._pool.submit(self._hash_and_write, self._block, self._size - BLOCK_BYTES, self._fds[-1])
        self._jobs.append((job, self._block))
        if len(self._jobs) < MAX_PENDING_BLOCKS:
            self._block = _page_aligned(BLOCK_BYTES)
        else:
            job, self._block = self._jobs.popleft()
            self.digests.append(job.result())

    def _hash_and_write(self, block: Bytes, start: int, fd: int) -> bytes:
        digest, unwritten = hashlib.sha256(block.data).digest(), block.data
        while len(unwritten):
            try:
                unwritten = unwritten[os.pwrite(fd, unwritten, start + len(block) - len(unwritten)) :]
            except OSError as error:
                if error.errno != errno.EINVAL or fd == self._fd:
                    raise
                # because: some file systems need larger alignments, and after a short write the rest is unaligned
                fd = self._fd
        return digest

    def entry(self) -> FileEntry:
        """Return the manifest's entry of this file; valid once the context has ended."""
        return FileEntry(self._size, root_hash(self.digests))

    def __enter__(self) -> HashedWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.digests += [job.result() for job, _ in self._jobs]
                if rest := self._size % BLOCK_BYTES:
                    self.digests.append(self._hash_and_write(self._block[:rest], self._size - rest, self._fd))
                os.fsync(self._fd)
        finally:
            self._pool.shutdown(cancel_futures=True)
            for fd in self._fds:
                os.close(fd)


def _page_aligned(num_bytes: int) -> Bytes:
    """Return memory that starts at a page, as O_DIRECT requires."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def write_hashed(
    path: Path, parts: Iterable[bytes | memoryview], point: str | None = None
) -> tuple[FileEntry, list[bytes]]:
    """Write the byte strings `parts` one after the other into a new file. Return the file's entry for the manifest and
    the SHA-256 digests of its 4 MiB blocks. `point` names a fault point, passed after each part, at which tests inject
    failures (see fault_injection.py).
    """
    with HashedWriter(path) as file:
        for part in parts:
            file.write(part)
            if point is not None:
                fault_point(point)
    return file.entry(), file.digests


def root_hash(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def encode_blocks(entry: FileEntry, digests: Sequence[bytes]) -> bytes:
    """Return the list of block hashes that lies beside a tensor file, as JSON."""
    blocks = {"size": entry.size, "block_bytes": BLOCK_BYTES, "root": entry.root, "blocks": [d.hex() for d in digests]}
    return json.dumps(blocks, indent=0).encode()


def read_hashed(path: Path, entry: FileEntry, limit_bytes: int) -> bytes:
    """Return a whole file. Raise CheckpointError if its size or hash is not that of `entry`, the file's entry in the
    manifest, or if it is larger than `limit_bytes`.
    """
    if entry.size > limit_bytes:
        raise CheckpointError(f"{path} has {entry.size} bytes; at most {limit_bytes} are allowed. {_RESTORE}")
    data = _read_range(path, entry.size, 0, entry.size)
    _check_root(path, entry, (data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)))
    return data


def verify_file(path: Path, entry: FileEntry) -> None:
    """Read a file of any size block by block. Raise CheckpointError if its size or root hash is not that of `entry`,
    the file's entry in the manifest.
    """
    _check_root(path, entry, (
        _read_range(path, entry.size, at, min(BLOCK_BYTES, entry.size - at)) for at in range(0, entry.size, BLOCK_BYTES)
    ))  # fmt: skip


def _check_root(path: Path, entry: FileEntry, blocks: Iterable[bytes]) -> None:
    if root_hash(hashlib.sha256(block).digest() for block in blocks) != entry.root:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in the manifest. {_RESTORE}")


class BlockCache:
    """An LRU cache of verified hash blocks of which only a part was used: the next read mostly needs the rest."""

    def __init__(self, num_blocks: int = 1) -> None:
        self._max_blocks = num_blocks
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
            if len(self._blocks) > self._max_blocks:
                self._blocks.popitem(last=False)


class HashedFile:
    """Reads any range of a large file; each block is verified when it is read. Threads may share it."""

    def __init__(self, path: Path, entry: FileEntry, digests: list[bytes], cache: BlockCache | None = None) -> None:
        if len(digests) != -(-entry.size // BLOCK_BYTES) or root_hash(digests) != entry.root:
            raise CheckpointError(f"{path} does not match its list of block hashes. {_RESTORE}")
        self.path, self.size = path, entry.size
        self._digests, self._cache = digests, cache or BlockCache()

    def read(self, start: int, size: int) -> memoryview:
        """Return `size` bytes of the file from byte `start` on; the range must lie inside the file. Raise
        CheckpointError if a block that they touch does not have its recorded hash.
        """
        if size and start // BLOCK_BYTES == (start + size - 1) // BLOCK_BYTES:
            return self._read_within_block(start, size)
        data = bytearray(size)
        self.read_into(start, memoryview(data))
        return memoryview(data)

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill `out`, a view of plain bytes, with the bytes of the file from byte `start` on. Raise CheckpointError if
        a block that they touch does not have its recorded hash.
        """
        assert 0 <= start <= start + len(out) <= self.size
        done = 0
        while done < len(out):
            rest_of_block = BLOCK_BYTES - (start + done) % BLOCK_BYTES
            part = self._read_within_block(start + done, min(len(out) - done, rest_of_block))
            out[done : done + len(part)] = part
            done += len(part)

    def verify(self) -> None:
        """Read and verify every block; raise CheckpointError for the first that is damaged."""
        for index in range(len(self._digests)):
            self._read_verified_block(index)

    def _read_within_block(self, start: int, size: int) -> memoryview:
        """Return `size` bytes of the file from byte `start` on, all of one 4 MiB block. Raise CheckpointError if the
        block does not have its recorded hash.
        """
        assert 0 <= start < start + size <= self.size
        index, at = divmod(start, BLOCK_BYTES)
        data = self._cache.get(self.path, index)
        if data is None:
            data = self._read_verified_block(index)
            if size < len(data):
                self._cache.put(self.path, index, data)
        return memoryview(data)[at : at + size]

    def _read_verified_block(self, index: int) -> bytes:
        start = index * BLOCK_BYTES
        data = _read_range(self.path, self.size, start, min(BLOCK_BYTES, self.size - start))
        if hashlib.sha256(data).digest() != self._digests[index]:
            raise CheckpointError(f"{self.path} is damaged in bytes {start} to {start + len(data) - 1}. {_RESTORE}")
        return data


def _read_range(path: Path, expected_size: int, start: int, size: int) -> bytes:
    """Return `size` bytes of a plain file from byte `start` on. Raise CheckpointError if the file is missing, or if it
    does not have `expected_size` bytes.

    The file is opened for each call, so that no descriptor stays open.
    """
    try:
        with read_errors(path), open_fd(path, follow_links=False) as (fd, actual_size):
            data = read_range(fd, start, size) if actual_size == expected_size else b""
    except (DataError, MissingInputError) as error:
        raise CheckpointError(str(error)) from error
    if actual_size != expected_size or len(data) != size:
        raise CheckpointError(f"{path} has {actual_size} bytes, but the manifest says {expected_size}. {_RESTORE}")
    return data
