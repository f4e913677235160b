"""Explain an OSError: which limit of the system it is about (disk, inodes, quota, open files), or what else to do.

Torch-free. Called wherever an OSError becomes an error of ours, so that each limit has one message.
"""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path

from lmtrain.errors import LmtrainError, MissingInputError, OutputError, StorageError, UsageError
from lmtrain.units import format_bytes

_OS_ERRORS: tuple[tuple[tuple[int, ...], type[LmtrainError], str], ...] = (
    (
        (errno.EAGAIN,), StorageError,
        "A process or a thread could not be started: {reason}. End other processes, or raise `ulimit -u`.",
    ),
    (
        (errno.ENAMETOOLONG, errno.EINVAL), UsageError,
        "{file:.100}... cannot be a file: {reason}. Give a shorter or another name.",
    ),
    (
        (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP), MissingInputError,
        "{file} cannot be opened: {reason}. Check the path; --debug shows the traceback.",
    ),
    (
        (errno.EROFS, errno.EEXIST, errno.ENOTEMPTY), OutputError,
        "{file} cannot be written: {reason}. Choose another output.",
    ),
)  # fmt: skip


def error_from_os(error: OSError) -> LmtrainError:
    """Convert an OSError that reached the top of the program to an LmtrainError with an exit code and a message that
    says what to do.
    """
    file, reason = str(error.filename or "a file"), error.strerror or str(error)
    if reached := limit_reached(error, Path(file)):
        return StorageError(f"Reading or writing {file} failed: {reached}")
    for numbers, error_type, message in _OS_ERRORS:
        if error.errno in numbers:
            return error_type(message.format(file=file, reason=reason))
    return StorageError(f"Reading or writing {file} failed: {reason}. Check the disk; --debug shows the traceback.")


def limit_reached(error: OSError, path: Path, need_bytes: int = 0) -> str | None:
    """Return which limit of the system an OSError of `path` reports (disk space, inodes, quota, file size, open files)
    and the way out, as the end of a message "PATH failed: ..."; None for other errors. `need_bytes` is the size of the
    whole operation, 0 if unknown; it is named if the disk is full.
    """
    if error.errno == errno.ENOSPC:
        disk = _disk(path)
        if disk is not None and disk.f_files and not disk.f_favail:
            return f"its disk has no inodes left for another file ({_free_text(path)} free). Remove files of any size."
        need = f"{format_bytes(need_bytes)} needed, " if need_bytes else ""
        return f"the disk is full ({need}{_free_text(path)} free). Free some space."
    if error.errno == errno.EDQUOT:
        return f"the quota of its disk is used up ({_free_text(path)} free for all). Remove files, or have it raised."
    if error.errno == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit == resource.RLIM_INFINITY:
            return "its file system takes no file that large. Choose another disk."
        return f"a file may have {format_bytes(limit)} here. Raise that limit with `ulimit -f unlimited`."
    if error.errno == errno.EMFILE:
        limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        way = f"that limit with `ulimit -n {hard}`" if limit < hard else "the limit of your login or job"
        return f"too many open files, of which this process may have {limit}. Raise {way}."
    if error.errno == errno.ENFILE:
        return "too many open files on the whole machine. End other programs, or raise fs.file-max."
    return None


def _free_text(path: Path) -> str:
    """Return the free space of the disk that holds a path, for a message."""
    disk = _disk(path)
    return "an unknown number of bytes" if disk is None else format_bytes(disk.f_bavail * disk.f_frsize)


def _disk(path: Path) -> os.statvfs_result | None:
    """Return os.statvfs of the disk that holds a path, or that will hold it once it exists; None if that fails."""
    for place in (path, *path.absolute().parents):
        with suppress(OSError):
            return os.statvfs(place)
    return None


