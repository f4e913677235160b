"""Files of which most was never written, told before a terabyte of zeros is read. Torch-free.

Called by whatever reads large files from their beginning to their end: corpora, and datasets that are evaluated.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from lmtrain.errors import DataError
from lmtrain.runtime.files.files import open_regular, read_errors
from lmtrain.units import format_bytes

_LARGE = 1 << 30  # bytes; holes in smaller files cost nothing


def refuse_hole(path: Path) -> None:
    """Such as a download that was cut short, or a copy that was only begun."""
    with read_errors(path):
        if os.stat(path).st_size <= _LARGE:
            return
        fd, size = open_regular(path, follow_links=True)
        try:
            written = at = 0
            while at < size:
                begin = os.lseek(fd, at, os.SEEK_DATA)
                at = os.lseek(fd, begin, os.SEEK_HOLE)
                written += at - begin
        except OSError as error:
            if error.errno != errno.ENXIO:  # there are no more data behind this place
                return  # a file system that does not say
        finally:
            os.close(fd)
    if written < size // 2:
        raise DataError(
            f"{path} has {format_bytes(size)}, of which {format_bytes(written)} were ever written: the rest is a hole. "
            "Copy the file again from where it is whole."
        )
