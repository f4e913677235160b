"""Files mapped into memory for reading, that say so when they can no longer be read. Torch-free.

Called by indexed.py and index_cache.py. A file that is cut short while it is mapped, or whose disk fails, ends a
process by a signal and without a word. csrc/mapped.cpp puts zeros in the place of what is gone, and `refuse_lost` names
the file before anybody uses them: ask it after what was read has been copied. Without the compiled helper only the
file's size is looked at, and such a signal ends the process as before.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain import native
from lmtrain.errors import DataError, StorageError
from lmtrain.runtime.files import files

_WATCHED: dict[int, Path] = {}  # by the number that csrc/ knows a mapping by


class Mapped:
    """All bytes of a plain file, of which there must be as many as `num_bytes` says."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self.num_bytes, self.fd = path, num_bytes, -1
        with files.read_errors(path):
            self.fd, size = files.open_regular(path, follow_links=True)
        if size < num_bytes:
            raise self._too_short(size)
        self.bytes = _map(self.fd, num_bytes, path)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def as_type(self, dtype: Any) -> NDArray[Any]:
        return self.bytes.view(dtype)

    def refuse_lost(self) -> None:
        """Raises where what was read of this file up to now may not be what is in it."""
        if (size := os.fstat(self.fd).st_size) < self.num_bytes:
            raise self._too_short(size)
        _refuse_failed()

    def _too_short(self, size: int) -> DataError:
        return DataError(
            f"{self.path} has become shorter while it was in use: {size} of its {self.num_bytes} bytes are left. "
            "Restore the file, let nobody write to it, and start the command again."
        )


class Watch:
    """Several mapped files, asked after at once: it is done for every batch."""

    def __init__(self, mapped: Sequence[Mapped]) -> None:
        self._mapped = mapped
        self._files = np.array([(one.fd, one.num_bytes) for one in mapped], np.int64).ravel()

    def refuse_lost(self) -> None:
        lib = native.lib
        if lib is None or lib.files_lost(self._files):
            for one in self._mapped:
                one.refuse_lost()


def _map(fd: int, num_bytes: int, path: Path) -> NDArray[np.uint8]:
    if num_bytes == 0:  # because: an empty file cannot be mapped
        return np.empty(0, np.uint8)
    if native.lib is None:
        return np.frombuffer(mmap.mmap(fd, num_bytes, access=mmap.ACCESS_READ), np.uint8)
    try:
        made: NDArray[np.uint8]
        made, number = native.lib.map_file(fd, num_bytes)
    except RuntimeError as error:
        raise StorageError(f"Reading {path} failed: {error}. Look at the limits of memory (`ulimit -v`).") from error
    _WATCHED[number] = path
    return made


def _refuse_failed() -> None:
    """Raises where any mapping of this process could not be read."""
    if native.lib is None or not native.lib.maps_failed():
        return
    for number, path in list(_WATCHED.items()):
        if native.lib.map_failed(number):
            raise StorageError(
                f"Reading {path} failed while it was in use: its disk has a fault, or somebody cut it short. "
                "Look at the system's log, restore the file and start the command again."
            )
