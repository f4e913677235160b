"""On-disk cache of slow-to-build indexes, as memory-mapped arrays named by a hash of their inputs. Torch-free.

Called by every module that indexes a dataset. An index is a folder of raw arrays and a facts.json that records the
inputs. An index is used only if the recorded inputs equal the requested ones, so that no stale index is ever used, and
only if every byte matches its checksum and every entry is in range. A damaged index is rebuilt with a warning. An index
is built under a temporary name and then renamed; if two processes need the same index, one builds it and the other
waits. Without a folder, or if the folder is not writable, the same arrays are built in memory.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.data.store.block_checksums import MappedFile
from lmtrain.data.store.indexed_dataset import hash_without
from lmtrain.errors import LmtrainError
from lmtrain.runtime.files import atomic_files
from lmtrain.runtime.files.crc32c import crc32c
from lmtrain.runtime.terminal_safe_text import warn

VERSION = 2
FACTS = "facts.json"
_HASH_KEY = "sha256"  # key of the hash over all other keys of facts.json
_DTYPES = ("<i2", "<i4", "<i8", "<u4", "<u8")
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_CHUNK = 1 << 20  # entries checked per pass, to bound memory
_CRC_BYTES = 1 << 28  # bytes between two updates of the checksum

Array = NDArray[Any]


@dataclass(frozen=True)
class Index:
    """A finished index: its arrays, memory-mapped or in memory, and the facts that its builder returned."""

    facts: dict[str, Any]
    arrays: Mapping[str, Array]
    folder: Path | None = None  # None: the arrays are in memory


EntryCheck = Callable[[Index], bool]  # returns True if every entry is in its allowed range


def all_within(array: Array, low: int, high: int) -> bool:
    """Return True if all entries are in low..high."""
    parts = (array[i : i + _CHUNK] for i in range(0, len(array), _CHUNK))
    return all(low <= int(part.min()) and int(part.max()) <= high for part in parts)


def is_ascending(array: Array) -> bool:
    """Return True if the array never decreases."""
    parts = (array[i : i + _CHUNK + 1] for i in range(0, len(array), _CHUNK))
    return all(bool((part[1:] >= part[:-1]).all()) for part in parts)


@dataclass
class IndexBuild:
    """Arrays of an index under construction: allocated at full size, or appended to piece by piece."""

    folder: Path | None
    arrays: dict[str, Array] = field(default_factory=dict)
    _pieces: dict[str, list[Array]] = field(default_factory=dict)
    _dtypes: dict[str, np.dtype[Any]] = field(default_factory=dict)

    def create(self, name: str, dtype: str, count: int) -> Array:
        """Return a new array of `count` zeros whose entries may be written in any order. It is a memory-mapped file
        `name` if the index has a folder, else in memory.
        """
        self._dtypes[name] = np.dtype(dtype)
        if self.folder is None or count == 0:
            self.arrays[name] = np.zeros(count, dtype)
            if self.folder is not None:
                (self.folder / name).touch()
        else:
            path = self.folder / name
            with open(path, "wb") as file:  # because: a full disk fails here; in a memory map it is a SIGBUS
                os.posix_fallocate(file.fileno(), 0, count * np.dtype(dtype).itemsize)
            self.arrays[name] = np.memmap(path, np.dtype(dtype), "r+", shape=(count,)).view(np.ndarray)
        return self.arrays[name]

    def append(self, name: str, dtype: str, values: Array) -> None:
        """Append values to the array `name` of this dtype; the first call creates the array."""
        values = np.ascontiguousarray(values, dtype)
        self._dtypes[name] = np.dtype(dtype)
        if self.folder is None:
            self._pieces.setdefault(name, []).append(values)
            return
        with open(self.folder / name, "ab") as file:
            file.write(values.data.cast("B") if values.size else b"")

    def finish(self, header: dict[str, Any]) -> None:
        """Complete the index: sync its arrays to disk, then write facts.json with `header` and the arrays' checksums.
        Without a folder, join the appended pieces in memory.
        """
        if self.folder is None:
            self.arrays |= {name: np.concatenate(arrays) for name, arrays in self._pieces.items()}
            return
        self.arrays.clear()
        array_facts = {}
        for name, dtype in self._dtypes.items():
            path = self.folder / name
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
            array_facts[name] = {
                "dtype": dtype.str,
                "count": path.stat().st_size // dtype.itemsize,
                "crc32c": _crc_of(MappedFile(path, path.stat().st_size)),
            }
        tree = header | {"arrays": array_facts}
        atomic_files.write_json(self.folder / FACTS, tree | {_HASH_KEY: hash_without(tree, _HASH_KEY)})


def _crc_of(file: MappedFile) -> int:
    """Return the CRC-32C of a whole mapped file. Raise DataError if the file was truncated meanwhile, StorageError if
    it could not be read.
    """
    crc = 0
    for first in range(0, file.num_bytes, _CRC_BYTES):
        crc = crc32c(file.bytes[first : first + _CRC_BYTES], crc)
    file.check_intact()
    return crc


@dataclass(frozen=True)
class IndexCache:
    """Cache of indexes in a folder; None builds in memory."""

    folder: Path | None

    def get(
        self, kind: str, describe_inputs: Callable[[], dict[str, Any]], build: Callable[[IndexBuild], dict[str, Any]],
        check: EntryCheck = lambda index: True,
    ) -> Index:  # fmt: skip
        """Return the index (a set of arrays) of this kind, such as "documents", for exactly the inputs that
        `describe_inputs` returns; build it if it is not in the cache. `build` fills its arrays and returns a dict to
        store with them; `check` returns True if all entries of a cached index are in range.
        """
        if self.folder is None:
            return _build_in_memory(build)
        inputs = atomic_files.parse_json(json.dumps(describe_inputs()).encode(), self.folder)
        text = json.dumps([kind, VERSION, inputs], sort_keys=True)
        path = self.folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        header = {"format": "lmtrain index", "version": VERSION, "kind": kind, "about": inputs}
        if (index := _read_index(path, header, check)) is not None:
            return index
        if os.path.lexists(path):
            warn(f"the index {path} is damaged. It is not used and is built again.")
        try:
            with _build_lock(self.folder, path.name) as has_lock:
                return _read_index(path, header, check) or _build_on_disk(path, header, build, check, has_lock)
        except _UnwritableFolder:
            return _build_in_memory(build)


def cache_if(is_large: bool, cache: IndexCache | None) -> IndexCache:
    """Return the cache if the index is large enough to be worth a file; else a cache that builds in memory."""
    return cache if cache is not None and is_large else IndexCache(None)


class _UnwritableFolder(Exception):
    """Raised if the index folder is not writable for this user."""


def _build_in_memory(build: Callable[[IndexBuild], dict[str, Any]]) -> Index:
    """Return an index in memory: `build` fills its arrays and returns a dict of facts to keep with them."""
    arrays = IndexBuild(None)
    facts = build(arrays)
    arrays.finish({})
    return Index(facts, arrays.arrays)


def _build_on_disk(
    path: Path, header: dict[str, Any], build: Callable[[IndexBuild], dict[str, Any]], check: EntryCheck, has_lock: bool
) -> Index:
    """Build an index under a temporary name, rename it to `path`, read it back and return it. `build` fills its arrays
    and returns a dict to store with them, `header` identifies its inputs, `check` returns True if its entries are in
    range, and `has_lock` is True if this process holds the lock on building it.
    """
    if has_lock:  # because: this process holds the lock, so these are left over from killed processes
        for leftover in path.parent.glob(f".{path.name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with atomic_files.storage_errors(path, "Writing"):
            arrays = IndexBuild(temporary)
            header = header | {"facts": build(arrays)}
            arrays.finish(header)
            if os.path.lexists(path) and _read_index(path, header, check) is None:  # a damaged index is replaced
                atomic_files.remove(path)
            temporary.chmod(0o755)
            try:
                os.rename(temporary, path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            atomic_files.fsync_dir(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if (index := _read_index(path, header, check)) is None:
        raise LmtrainError(f"The index {path} was just built, but cannot be read. Remove it and try again.")
    return index


@contextmanager
def _build_lock(folder: Path, name: str) -> Iterator[bool]:
    """Hold the lock on building the index `name` of a folder, after waiting for other processes that build it. Yield
    whether the lock is held; it is not if the file system has no locks.

    Raise _UnwritableFolder if the folder is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in _UNWRITABLE:
            raise _UnwritableFolder from error
        with atomic_files.storage_errors(folder, "Making"):
            raise
    try:
        has_lock = False
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
            has_lock = True
        yield has_lock
    finally:
        os.close(fd)


def _read_index(path: Path, header: dict[str, Any], check: EntryCheck) -> Index | None:
    """Return the index in the folder `path`. Return None if there is none, if it is damaged, if its facts.json differs
    from `header`, or if `check` finds an entry out of range.
    """
    try:
        tree = atomic_files.read_json(path / FACTS)
        is_same = all(tree.get(key) == value for key, value in header.items())
        if tree.get(_HASH_KEY) != hash_without(tree, _HASH_KEY) or not is_same:
            return None
        arrays = {}
        for name, entry in tree["arrays"].items():
            if not atomic_files.is_safe_name(name) or entry["dtype"] not in _DTYPES:
                return None
            dtype, num_bytes = np.dtype(entry["dtype"]), (path / name).stat().st_size
            if num_bytes != int(entry["count"]) * dtype.itemsize:
                return None
            file = MappedFile(path / name, num_bytes)
            if _crc_of(file) != entry["crc32c"]:
                return None
            arrays[name] = file.bytes.view(dtype)
        index = Index(dict(tree["facts"]), arrays, path)
        return index if check(index) else None
    except (LmtrainError, OSError, KeyError, TypeError, ValueError, AttributeError):
        return None
