"""The files in a file: in a zip or tar archive those that are wanted, else the file itself, unpacked if it is packed.

What a file is, is told from its first bytes. Archives are read as streams: no name in them becomes a path, nothing is
unpacked to disk, and what grows out of all proportion is refused. Called by published.py and by files of corpora.
"""

from __future__ import annotations

import errno
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from data_tools.read.streams import DamagedArchiveError, as_file, read_member, read_stream
from lmtrain.errors import DataError
from lmtrain.runtime.files.files import read_errors

Wanted = Callable[[str, int], bool]  # is told a member's name, without folders, and its size
Contents = Iterator[tuple[str, IO[bytes]]]  # names, and streams to be read before the next is asked for
CODECS = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zst"}
_ZIP = b"PK\x03\x04"
_TAR, _TAR_AT = b"ustar", 257
# because: a RuntimeError says that a password is wanted, or an unknown method of packing; the last ones are slips of
# the library's over names and lengths that make no sense
_DAMAGE = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, RuntimeError, ValueError, IndexError, OverflowError,
    struct.error,
)  # fmt: skip


def contents(path: Path, wanted: Wanted) -> Contents:
    """The members that are wanted; of a file that is no archive its only content, wanted or not."""
    with read_errors(path), open(path, "rb") as file:
        start = file.read(8)
        file.seek(0)
        if start.startswith(_ZIP):
            yield from _zip_members(file, wanted, path)
            return
        codec = next((codec for magic, codec in CODECS.items() if start.startswith(magic)), "")
        stream = as_file(read_stream(file, codec), path)
        if stream.peek()[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
            yield from _tar_members(stream, wanted, path)
        else:
            yield path.name.removesuffix(f".{codec}"), stream


def _zip_members(file: IO[bytes], wanted: Wanted, path: Path) -> Contents:
    damaged = _damage(lambda cause: DataError(f"{path} is not a whole zip archive ({cause}). Get it again."))
    with damaged, zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            name = info.filename.rsplit("/", 1)[-1]
            if name and wanted(name, info.file_size):
                with archive.open(info) as inner:
                    yield name, _member(inner, info.compress_size, path)


def _tar_members(stream: io.BufferedReader, wanted: Wanted, path: Path) -> Contents:
    damaged = _damage(lambda cause: DataError(f"{path} is not a whole tar archive ({cause}). Get it again."))
    with damaged, tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            name = member.name.rsplit("/", 1)[-1]
            inner = archive.extractfile(member) if member.isreg() and wanted(name, member.size) else None
            if inner is not None:
                yield name, _member(inner, member.size, path)


def _member(file: IO[bytes], packed_bytes: int, path: Path) -> IO[bytes]:
    """Damage that shows when it is read is an error of ours, too."""

    def stream() -> Iterator[bytes]:
        with _damage(lambda cause: DamagedArchiveError(f"the archive is damaged ({cause})")):
            yield from read_member(file, packed_bytes)

    return as_file(stream(), path)


@contextmanager
def _damage(named: Callable[[str], Exception]) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise named(str(error)) from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # because: damage can point to before the file's beginning
            raise
        raise named(str(error)) from error
