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

from lmtrain.data.store.blocks import Mapped
from lmtrain.data.store.format import seal
from lmtrain.errors import LmtrainError
from lmtrain.observe.safe_text import warn
from lmtrain.runtime.files import files
from lmtrain.runtime.files.checksum import crc32c

VERSION = 2
FACTS = "facts.json"
_SEAL = "sha256"  # key of the hash over all other keys of facts.json
_DTYPES = ("<i2", "<i4", "<i8", "<u4", "<u8")
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)
_CHUNK = 1 << 20  # entries checked per pass, to bound memory
_CRC_BYTES = 1 << 28  # bytes between two updates of the checksum

Array = NDArray[Any]


@dataclass(frozen=True)
class Index:
    facts: dict[str, Any]
    arrays: Mapping[str, Array]
    folder: Path | None = None  # None: the arrays are in memory


Check = Callable[[Index], bool]  # returns True if every entry is in its allowed range


def within(array: Array, low: int, high: int) -> bool:
    """Return True if all entries are in low..high."""
    parts = (array[i : i + _CHUNK] for i in range(0, len(array), _CHUNK))
    return all(low <= int(part.min()) and int(part.max()) <= high for part in parts)


def rises(array: Array) -> bool:
    """Return True if the array never decreases."""
    parts = (array[i : i + _CHUNK + 1] for i in range(0, len(array), _CHUNK))
    return all(bool((part[1:] >= part[:-1]).all()) for part in parts)


@dataclass
class Build:
    """Arrays of an index under construction: allocated whole, or appended to piece by piece."""

    folder: Path | None
    arrays: dict[str, Array] = field(default_factory=dict)
    _grown: dict[str, list[Array]] = field(default_factory=dict)
    _dtypes: dict[str, np.dtype[Any]] = field(default_factory=dict)

    def create(self, name: str, dtype: str, count: int) -> Array:
        """Return a zeroed array of `count` entries to write in any order; memory-mapped if there is a folder."""
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

    def append(self, name: str, dtype: str, more: Array) -> None:
        more = np.ascontiguousarray(more, dtype)
        self._dtypes[name] = np.dtype(dtype)
        if self.folder is None:
            self._grown.setdefault(name, []).append(more)
            return
        with open(self.folder / name, "ab") as file:
            file.write(more.data.cast("B") if more.size else b"")

    def finish(self, header: dict[str, Any]) -> None:
        """Sync all arrays to disk, then write facts.json. In memory, join the appended pieces."""
        if self.folder is None:
            self.arrays |= {name: np.concatenate(arrays) for name, arrays in self._grown.items()}
            return
        self.arrays.clear()
        described = {}
        for name, dtype in self._dtypes.items():
            path = self.folder / name
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
            described[name] = {
                "dtype": dtype.str,
                "count": path.stat().st_size // dtype.itemsize,
                "crc32c": _crc_of(Mapped(path, path.stat().st_size)),
            }
        tree = header | {"arrays": described}
        files.write_json(self.folder / FACTS, tree | {_SEAL: seal(tree, _SEAL)})


def _crc_of(file: Mapped) -> int:
    crc = 0
    for first in range(0, file.num_bytes, _CRC_BYTES):
        crc = crc32c(file.bytes[first : first + _CRC_BYTES], crc)
    file.refuse_lost()
    return crc


class IndexCache:
    """Cache of indexes in a folder; None builds in memory. `say` receives warnings about damaged indexes."""

    def __init__(self, folder: Path | None, say: Callable[[str], None] = warn) -> None:
        self.folder, self.say = folder, say

    def get(
        self, kind: str, about: Callable[[], dict[str, Any]], build: Callable[[Build], dict[str, Any]],
        check: Check = lambda index: True,
    ) -> Index:  # fmt: skip
        """Return the index of this kind for exactly the inputs `about`, building it if it is not cached."""
        if self.folder is None:
            return _in_memory(build)
        plain = files.parse_json(json.dumps(about()).encode(), self.folder)
        text = json.dumps([kind, VERSION, plain], sort_keys=True)
        path = self.folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        header = {"format": "lmtrain index", "version": VERSION, "kind": kind, "about": plain}
        if (found := _read(path, header, check)) is not None:
            return found
        if os.path.lexists(path):
            self.say(f"the index {path} is damaged. It is not used and is built again.")
        try:
            with _alone(self.folder, path.name) as sure:
                return _read(path, header, check) or _on_disk(path, header, build, check, sure)
        except _Unwritable:
            return _in_memory(build)


def kept_if(large: bool, cache: IndexCache | None) -> IndexCache:
    """Return the cache if the index is large enough for a file; else a cache that builds in memory."""
    return cache if cache is not None and large else IndexCache(None)


class _Unwritable(Exception):
    """Raised if the index folder is not writable for this user."""


def _in_memory(build: Callable[[Build], dict[str, Any]]) -> Index:
    made = Build(None)
    facts = build(made)
    made.finish({})
    return Index(facts, made.arrays)


def _on_disk(
    path: Path, header: dict[str, Any], build: Callable[[Build], dict[str, Any]], check: Check, sure: bool
) -> Index:
    """Build an index under a temporary name, rename it and read it back. `sure`: this process holds the lock."""
    if sure:  # because: this process holds the lock, so these are left over from killed processes
        for left in path.parent.glob(f".{path.name}.*"):
            shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with files.storage_errors(path, "Writing"):
            made = Build(temporary)
            header = header | {"facts": build(made)}
            made.finish(header)
            if os.path.lexists(path) and _read(path, header, check) is None:  # a damaged index is replaced
                files.remove(path)
            temporary.chmod(0o755)
            try:
                os.rename(temporary, path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            files.fsync_dir(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if (index := _read(path, header, check)) is None:
        raise LmtrainError(f"{path} was built and cannot be read back. Remove it and try again.")
    return index


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[bool]:
    """Hold the lock on building this index, waiting for other processes; yield False if the file system has no locks.

    Raise _Unwritable if the folder is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in _NOT_OURS:
            raise _Unwritable from error
        with files.storage_errors(folder, "Making"):
            raise
    try:
        sure = False
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
            sure = True
        yield sure
    finally:
        os.close(fd)


def _read(path: Path, header: dict[str, Any], check: Check) -> Index | None:
    """Return the index in this folder if its inputs match and it is undamaged, else None."""
    try:
        tree = files.read_json(path / FACTS)
        if tree.get(_SEAL) != seal(tree, _SEAL) or any(tree.get(key) != value for key, value in header.items()):
            return None
        arrays = {}
        for name, entry in tree["arrays"].items():
            if not files.is_safe_name(name) or entry["dtype"] not in _DTYPES:
                return None
            dtype, num_bytes = np.dtype(entry["dtype"]), (path / name).stat().st_size
            if num_bytes != int(entry["count"]) * dtype.itemsize:
                return None
            file = Mapped(path / name, num_bytes)
            if _crc_of(file) != entry["crc32c"]:
                return None
            arrays[name] = file.bytes.view(dtype)
        index = Index(dict(tree["facts"]), arrays, path)
        return index if check(index) else None
    except (LmtrainError, OSError, KeyError, TypeError, ValueError, AttributeError):
        return None
