"""Files mapped into memory for reading, that say so when they can no longer be read. Torch-free.

Called by indexed.py and index_cache.py. A file that is cut short while it is mapped, or whose disk fails, ends a
process by a signal and without a word. csrc/mapped.cpp puts zeros in the place of what is gone, and `refuse_lost` names
the file before anybody uses them: ask it after what was read has been copied. Without the compiled helper only the
file's size is looked at, and such a signal ends the process as before.
"""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain import native
from lmtrain.errors import DataError, StorageError
from lmtrain.runtime import files

_WATCHED: dict[int, Path] = {}  # by the number that csrc/ knows a mapping by


class Mapped:
    """All bytes of a plain file, of which there must be as many as `num_bytes` says."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes
        self.bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._map: mmap.mmap | None = None
        if num_bytes == 0:  # because: an empty file cannot be mapped
            return
        with files.read_errors(path):
            fd, size = files.open_regular(path, follow_links=True)
            try:
                if size < num_bytes:
                    raise self._too_short(size)
                self._map = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_READ)
            finally:
                os.close(fd)
        self.bytes = np.frombuffer(self._map, np.uint8)
        if native.lib is not None and hasattr(native.lib, "watch_map"):
            number = native.lib.watch_map(self.bytes, num_bytes)
            _WATCHED[number] = path
            weakref.finalize(self._map, _forget, number)

    def as_type(self, dtype: Any) -> NDArray[Any]:
        return self.bytes.view(dtype)

    def refuse_lost(self) -> None:
        """Raises where what was read of this file up to now may not be what is in it."""
        if self._map is not None and (size := self._map.size()) < self.num_bytes:
            raise self._too_short(size)
        refuse_failed()

    def _too_short(self, size: int) -> DataError:
        return DataError(
            f"{self.path} has become shorter while it was in use: {size} of its {self.num_bytes} bytes are left. "
            "Restore the file, let nobody write to it, and start the command again."
        )


def refuse_failed() -> None:
    """Raises where any mapping of this process could not be read."""
    if native.lib is None or not hasattr(native.lib, "maps_failed") or native.lib.maps_failed() == 0:
        return
    for number, path in list(_WATCHED.items()):
        if native.lib.map_failed(number):
            raise StorageError(
                f"Reading {path} failed while it was in use: its disk has a fault, or somebody cut it short. "
                "Look at the system's log, restore the file and start the command again."
            )


def _forget(number: int) -> None:
    assert native.lib is not None
    native.lib.unwatch_map(number)
    _WATCHED.pop(number, None)
