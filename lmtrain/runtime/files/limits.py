"""Which limit of the machine a refusal of the system is about, in words, and how to lift it. Torch-free.

Called wherever an OSError becomes an error of ours, so that a limit is called what it is everywhere.
"""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path

from lmtrain.units import format_bytes


def limit_reached(error: OSError, path: Path, need_bytes: int = 0) -> str | None:
    """Return which limit was reached and a way out, to follow "PATH failed: "; None if the error is another one."""
    if error.errno == errno.ENOSPC:
        found = _disk(path)
        if found is not None and found.f_files and not found.f_favail:
            return f"its disk has room for no further file (0 inodes, {_free(path)} free). Remove files, however small."
        need = f"{format_bytes(need_bytes)} needed, " if need_bytes else ""
        return f"the disk is full ({need}{_free(path)} free). Free some space."
    if error.errno == errno.EDQUOT:
        return f"your quota on that disk is used up ({_free(path)} free for others). Remove files, or have it raised."
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


def _free(path: Path) -> str:
    found = _disk(path)
    return "an unknown number of bytes" if found is None else format_bytes(found.f_bavail * found.f_frsize)


def _disk(path: Path) -> os.statvfs_result | None:
    """Return the state of the disk that holds a path, or will hold it once it exists."""
    for place in (path, *path.absolute().parents):
        with suppress(OSError):
            return os.statvfs(place)
    return None


