"""The decision about what is at the place of an output already: whether a command goes on, has nothing to do, replaces
it or is refused. Torch-free.

Every verb that writes calls `check_output` before it works. The caller finds out whether the output is unfinished or
was made of the same inputs and options, since it knows what its files record; what follows is decided here.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from lmtrain import __version__
from lmtrain.errors import OutputError, way
from lmtrain.runtime.files.atomic_files import refuse_special_file

_MAX_LINE_BYTES = 16 << 20  # because: a document may be long, and the decision must be quick
_HEAD_BYTES = 1 << 16


class Kind(NamedTuple):
    """A kind of output: its name in messages, such as "a tokenizer", a function that says whether the file or folder at
    a path is one, whether it is a folder, and whether an empty file or folder may become one.
    """

    name: str
    fits: Callable[[Path], bool]
    is_folder: bool = False  # one that is empty is as good as none
    takes_empty: bool = True


class Found(Enum):
    """Answers to what is at the place of an output, for the command that is to write it."""

    NOTHING = "nothing"
    UNFINISHED = "an unfinished output of this command, which goes on"
    SAME = "the output of this command, which has nothing to do"
    OTHER = "another output, which is replaced"


def check_output(
    path: Path, kind: Kind, *, overwrite: bool, is_default: bool = False, is_same: bool = False,
    is_unfinished: bool = False,
) -> Found:  # fmt: skip
    """Return what is at `path`, where a command is to write something of this kind. Raise OutputError if it must stay:
    if it is of another kind, a link or read-only, or if it may be replaced and neither `overwrite` was given nor
    `is_default` states that the command chose the path itself.

    `is_same` states that what is there was made of the same inputs and options, as recorded beside it; `is_unfinished`
    that the same command began it and can go on.
    """
    refuse_special_file(path)
    if not os.path.lexists(path):
        return Found.NOTHING
    if is_unfinished:
        return Found.UNFINISHED
    if is_same and not overwrite:
        return Found.SAME
    has_type = path.is_dir() == kind.is_folder
    is_empty = has_type and kind.takes_empty and _is_empty(path)
    if not has_type or not (is_empty or kind.fits(path)):
        raise OutputError(f"{path} is not {kind.name}, so it is not replaced. Choose another output.")
    is_free = is_empty and kind.is_folder
    if not (overwrite or is_default or is_free):
        raise OutputError(
            f"{path} is there already. Choose another output, or add {way('--overwrite')} to replace it."
        )
    if not os.stat(path).st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        raise OutputError(f"{path} is read-only, so it is not replaced. Choose another output, or make it writable.")
    return Found.NOTHING if is_free else Found.OTHER


def _is_empty(path: Path) -> bool:
    """Return whether a folder has no entries, or a file no bytes."""
    return not os.listdir(path) if path.is_dir() else not os.path.getsize(path)


def begins_with(*beginnings: bytes) -> Callable[[Path], bool]:
    """Return a function that says whether the file at a path begins with one of these bytes."""

    return lambda path: _head(path, max(map(len, beginnings))).startswith(beginnings)


def holds(mark: str) -> Callable[[Path], bool]:
    """Return a function that says whether the beginning of the file at a path, 64 KiB, holds this text."""

    return lambda path: mark.encode() in _head(path, _HEAD_BYTES)


def _head(path: Path, num_bytes: int) -> bytes:
    """Return the first bytes of the file at a path, at most `num_bytes`; none if it cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(num_bytes)
    return b""


def has_rows_with(*keys: str) -> Callable[[Path], bool]:
    """Return a function that says whether the first line of the file at a path is a JSON object with all these keys."""

    def fits(path: Path) -> bool:
        with suppress(OSError, ValueError, RecursionError), open(path, "rb") as file:
            row = json.loads(file.readline(_MAX_LINE_BYTES))
            return isinstance(row, dict) and row.keys() >= set(keys)
        return False

    return fits


def made_from(options: Any, files: Iterable[Path]) -> str:
    """Return a text to record beside an output, equal if it was made by this version of lmtrain with the same options,
    a value of JSON, and of the same files: their path, size and modification time.
    """
    facts = [__version__, options, file_identities(files)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def file_identities(files: Iterable[Path]) -> Sequence[tuple[str, int, int]]:
    """Return (path, size in bytes, modification time in ns) of each file that exists."""
    states = [(path, os.stat(path)) for path in files if path.exists()]
    return [(str(path.resolve()), state.st_size, state.st_mtime_ns) for path, state in states]
