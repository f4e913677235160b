"""Sequential readers: compressed files, archives and pipes as streams of bytes, .parquet as rows.

Called by cut_files_into_chunks.py and corpora. An archive may be hostile: decompression bombs are detected after 64
MiB, and no output step is larger than the input can make a single step of the decompressor. A truncated archive is
reported as damaged, not as short.

`archive_contents` yields the files within a file: the requested members of a zip or tar archive, else the file itself,
decompressed if it is compressed. The kind of a file is detected from its first bytes. No name in an archive becomes a
path, and nothing is unpacked to disk.

For a .parquet file `read_rows` yields only the requested columns, a bounded number of rows at a time. Columns are read
as dictionaries if they have one, so that a text that occurs a million times in the file is in memory once.
"""

from __future__ import annotations

import bz2
import errno
import importlib
import io
import lzma
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from data_tools.read.find_input_files import STDIN, Source, codec_of
from lmtrain.errors import DataError, UsageError
from lmtrain.runtime.files.atomic_files import read_errors
from lmtrain.runtime.machine.pip_install_hint import install_command

# because: text compresses 3 to 10 times, logs 50 times; zeros compress 1000 times (gz) or 10,000 times (zst)
MAX_RATIO = 250
ALWAYS_ALLOWED_BYTES = 64 << 20
STEP_BYTES = 1 << 20
_FEED_BYTES = 64 << 10
# because: four bytes of a zst file can expand to 128 KiB, and the library returns the output of all its input at once
_ZST_FEED_BYTES = 2 << 10
_ZST_WINDOW_BYTES = 128 << 20  # the zstd command's limit
MemberFilter = Callable[[str, int], bool]  # receives a member's name, without folders, and its size
Contents = Iterator[tuple[str, IO[bytes]]]  # (name, stream); a stream is valid until the next item
CODECS = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zst"}
_ZIP = b"PK\x03\x04"
_TAR, _TAR_AT = b"ustar", 257
# because: RuntimeError means a password or an unknown compression method; the library raises the exceptions from
# ValueError on for senseless names and lengths
_DAMAGE_ERRORS = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, RuntimeError, ValueError, IndexError, OverflowError,
    struct.error,
)  # fmt: skip
_MAX_ROWS = 4096
Text = str | bytes | None  # bytes if the text is not valid UTF-8, which the caller reports
Rows = list[tuple[Text, ...]]


class DamagedArchiveError(Exception):
    """Raised in the middle of a stream; the message is the cause."""


class _CountingReader:
    """Wrapper of a file without tell(): counts the bytes read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._at = file, 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size) or b""
        self._at += len(data)
        return data

    def tell(self) -> int:
        return self._at


@contextmanager
def open_source(source: Source) -> Iterator[IO[bytes]]:
    """Open a source for reading its bytes sequentially, as stored: compressed data is not decompressed. Standard input
    is read unbuffered.
    """
    if source.path == STDIN:
        # because: a thread blocked in a buffered read holds the buffer's lock, and the process could not exit
        yield cast("IO[bytes]", _CountingReader(getattr(sys.stdin.buffer, "raw", sys.stdin.buffer)))
        return
    with read_errors(source.path), open(source.path, "rb") as file:
        yield file


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed if its suffix names a compression."""
    with read_errors(path), open(path, "rb") as file:
        yield as_file(read_stream(file, codec_of(path.name)), path)


def read_stream(file: IO[bytes], codec: str) -> Iterator[bytes]:
    """Yield the content of an open file in pieces, decompressed if `codec` is gz, bz2, xz or zst, unchanged if it is
    "". If the compressed data is damaged, yield what precedes the damage, then raise DamagedArchiveError.
    """
    if not codec:
        yield from _read_full_steps(file)
    else:
        yield from _check_ratio(_UNPACK[codec](file), file.tell)


def _check_ratio(stream: Iterator[bytes], compressed_bytes_read: Callable[[], int]) -> Iterator[bytes]:
    """Yield the pieces of `stream`, decompressed data, unchanged. Raise DamagedArchiveError once they are more than
    ALWAYS_ALLOWED_BYTES in total and more than MAX_RATIO times the compressed bytes read so far, which
    `compressed_bytes_read` returns.
    """
    num_bytes = 0
    for data in stream:
        num_bytes += len(data)
        if num_bytes > max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * compressed_bytes_read()):
            raise DamagedArchiveError(f"the archive grows to more than the allowed {MAX_RATIO} times its size")
        yield data


class _StreamFile(io.RawIOBase):
    """Readable file of an iterator's data."""

    def __init__(self, stream: Iterator[bytes], path: Path) -> None:
        self._stream, self._path, self._rest = stream, path, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            while not self._rest and (data := next(self._stream, None)) is not None:
                self._rest = data
        except DamagedArchiveError as error:
            raise DataError(f"{self._path} cannot be decompressed: {error}. Get it again.") from error
        piece, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)


def as_file(stream: Iterator[bytes], path: Path) -> io.BufferedReader:
    """Wrap an iterator of data as a readable file; reading a damaged archive raises DataError with `path`."""
    return io.BufferedReader(_StreamFile(stream, path), STEP_BYTES)


def _read_full_steps(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the data of a file in pieces of exactly STEP_BYTES (the last may be shorter), even if a pipe returns less
    at a time, so that later chunk boundaries do not depend on the pipe.
    """
    while True:
        parts, missing = [], STEP_BYTES
        while missing and (data := file.read(missing)):
            parts.append(data)
            missing -= len(data)
        if not parts:
            return
        yield b"".join(parts)


def _gunzip(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the decompressed data of one or more concatenated gzip archives."""
    data, decompressor = file.read(_FEED_BYTES), zlib.decompressobj(31)
    while data:
        try:
            yield decompressor.decompress(data, STEP_BYTES)
            while not decompressor.eof and decompressor.unconsumed_tail:
                yield decompressor.decompress(decompressor.unconsumed_tail, STEP_BYTES)
            data = decompressor.unused_data or file.read(_FEED_BYTES)
            while not decompressor.eof and not data and (rest := decompressor.decompress(b"", STEP_BYTES)):
                yield rest
        except zlib.error as error:
            raise DamagedArchiveError(f"the archive is damaged ({error})") from error
        if decompressor.eof:
            data = _next_archive(data, file)
            decompressor = zlib.decompressobj(31) if data else decompressor
    if not decompressor.eof:
        raise DamagedArchiveError("the archive is cut short")


def _next_archive(data: bytes, file: IO[bytes]) -> bytes:
    """Return the first bytes of the next concatenated archive, b"" if there is none. `data` is what was already read
    behind the last archive; zeros, as used for padding on tapes, are skipped.
    """
    data, num_zeros = data.lstrip(b"\0"), 0
    while not data and (more := file.read(_FEED_BYTES)):
        data, num_zeros = more.lstrip(b"\0"), num_zeros + len(more)
        if num_zeros > ALWAYS_ALLOWED_BYTES:
            raise DamagedArchiveError("the archive is followed by too many zeros")
    return data


def _decompress(build_decompressor: Callable[[], Any], file: IO[bytes]) -> Iterator[bytes]:
    """Yield the decompressed data of one or more concatenated bz2 or xz archives. `build_decompressor` returns a new
    decompressor for one archive.
    """
    data, decompressor = file.read(_FEED_BYTES), build_decompressor()
    while data:
        try:
            yield decompressor.decompress(data, STEP_BYTES)
            while not decompressor.eof and not decompressor.needs_input:
                yield decompressor.decompress(b"", STEP_BYTES)
        except (OSError, lzma.LZMAError) as error:
            raise DamagedArchiveError(f"the archive is damaged ({error})") from error
        data = _next_archive(decompressor.unused_data, file) if decompressor.eof else file.read(_FEED_BYTES)
        if decompressor.eof and data:
            decompressor = build_decompressor()
    if not decompressor.eof:
        raise DamagedArchiveError("the archive is cut short")


def _unzstd(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the decompressed data of one or more concatenated zstd frames."""
    zstandard = _import_package("zstandard", "zst")
    build: Callable[[], Any] = zstandard.ZstdDecompressor(max_window_size=_ZST_WINDOW_BYTES).decompressobj
    decompressor, data = build(), file.read(_ZST_FEED_BYTES)
    pieces: list[bytes] = []
    num_bytes = 0  # bytes held; because: `pieces` may have many empty items, from a hundred thousand empty archives
    while data:
        try:
            pieces.append(decompressor.decompress(data))
        except zstandard.ZstdError as error:
            yield b"".join(pieces)
            raise DamagedArchiveError(f"the archive is damaged ({error})") from error
        num_bytes += len(pieces[-1])
        if num_bytes >= STEP_BYTES:
            yield b"".join(pieces)
            pieces, num_bytes = [], 0
        data = (decompressor.unused_data if decompressor.eof else b"") or file.read(_ZST_FEED_BYTES)
        if decompressor.eof and data:
            decompressor = build()
    yield b"".join(pieces)
    if not decompressor.eof:
        raise DamagedArchiveError("the archive is cut short")


_UNPACK: dict[str, Callable[[IO[bytes]], Iterator[bytes]]] = {
    "gz": _gunzip,
    "bz2": partial(_decompress, bz2.BZ2Decompressor),
    "xz": partial(_decompress, lzma.LZMADecompressor),
    "zst": _unzstd,
}


# ---- archives --------------------------------------------------------------------------------------------------------


def archive_contents(path: Path, is_wanted: MemberFilter) -> Contents:
    """Yield (name, stream) of each member of a zip or tar archive for which `is_wanted(name, size)` returns True. For a
    file that is no such archive, yield its own name and content, decompressed if it is compressed.
    """
    with read_errors(path), open(path, "rb") as file:
        start = file.read(8)
        file.seek(0)
        if start.startswith(_ZIP):
            yield from _zip_members(file, is_wanted, path)
            return
        codec = next((codec for magic, codec in CODECS.items() if start.startswith(magic)), "")
        stream = as_file(read_stream(file, codec), path)
        if stream.peek()[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
            yield from _tar_members(stream, is_wanted, path)
        else:
            yield path.name.removesuffix(f".{codec}"), stream


def _zip_members(file: IO[bytes], is_wanted: MemberFilter, path: Path) -> Contents:
    """Yield (name, stream) of the members of a zip archive for which `is_wanted(name, size)` returns True."""
    with (
        _convert_damage(lambda cause: DataError(f"{path} is not a complete zip archive ({cause}). Get it again.")),
        zipfile.ZipFile(file) as archive,
    ):
        for info in archive.infolist():
            name = info.filename.rsplit("/", 1)[-1]
            if name and is_wanted(name, info.file_size):
                with archive.open(info) as inner:
                    yield name, _open_member(inner, info.compress_size, path)


def _tar_members(stream: io.BufferedReader, is_wanted: MemberFilter, path: Path) -> Contents:
    """Yield (name, stream) of the members of a tar archive, read sequentially, for which `is_wanted(name, size)`
    returns True.
    """
    with (
        _convert_damage(lambda cause: DataError(f"{path} is not a complete tar archive ({cause}). Get it again.")),
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        for member in archive:
            name = member.name.rsplit("/", 1)[-1]
            inner = archive.extractfile(member) if member.isreg() and is_wanted(name, member.size) else None
            if inner is not None:
                yield name, _open_member(inner, member.size, path)


def _open_member(file: IO[bytes], compressed_bytes: int, path: Path) -> IO[bytes]:
    """Return `file`, a member of the archive `path`, as a file that raises DataError if damage is found while it is
    read. `compressed_bytes` is its size in the archive, which limits how far it may expand.
    """

    def stream() -> Iterator[bytes]:
        with _convert_damage(lambda cause: DamagedArchiveError(f"the archive is damaged ({cause})")):
            yield from _check_ratio(_read_full_steps(file), lambda: compressed_bytes)

    return as_file(stream(), path)


@contextmanager
def _convert_damage(build_error: Callable[[str], Exception]) -> Iterator[None]:
    """Run the `with` block and raise `build_error(cause)` in place of the exceptions that the archive libraries raise
    for damaged data.
    """
    try:
        yield
    except _DAMAGE_ERRORS as error:
        raise build_error(str(error)) from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # because: damage can cause a seek before the file's start
            raise
        raise build_error(str(error)) from error


# ---- tables ----------------------------------------------------------------------------------------------------------


def read_rows(
    path: Path, columns: Sequence[str], start_row: int, batch_bytes: int, key_option: str = "--key"
) -> Iterator[tuple[int, Rows, int, float]]:
    """Yield batches of rows of a .parquet file from row `start_row` on: (number of the first row, rows, bytes of their
    texts, share of the file read so far). A row is the texts of `columns`.

    Raise DataError for a damaged file or a missing column; `key_option` is what a user types to name another column.
    """
    pyarrow, parquet = _import_package("pyarrow", "parquet"), _import_package("pyarrow.parquet", "parquet")
    with read_errors(path):
        try:
            _check_columns(parquet.read_schema(path), columns, path, pyarrow, key_option)
            with parquet.ParquetFile(path, read_dictionary=list(columns)) as file:
                yield from _row_batches(file, columns, start_row, batch_bytes)
        except (pyarrow.ArrowException, OSError, IndexError, UnicodeDecodeError) as error:  # names may be bad UTF-8
            if isinstance(error, FileNotFoundError):
                raise
            raise DataError(f"{path} cannot be read as .parquet ({error}). It is damaged or another file.") from error


def _row_batches(
    parquet_file: Any, columns: Sequence[str], start_row: int, batch_bytes: int
) -> Iterator[tuple[int, Rows, int, float]]:
    """Yield batches of rows of an open pyarrow ParquetFile from row `start_row` on: (number of the first row, rows,
    bytes of their texts, share of the file read so far). A batch has about batch_bytes of text.
    """
    at, total = 0, max(parquet_file.metadata.num_rows, 1)
    for group in range(parquet_file.metadata.num_row_groups):
        group_facts = parquet_file.metadata.row_group(group)
        num_rows = max(1, min(_MAX_ROWS, batch_bytes * group_facts.num_rows // max(group_facts.total_byte_size, 1)))
        if at + group_facts.num_rows <= start_row:
            at += group_facts.num_rows
            continue
        for batch in parquet_file.iter_batches(batch_size=num_rows, row_groups=[group], columns=list(columns)):
            for first, rows, num_bytes in _split_batch(at, batch, columns, batch_bytes):
                if first >= start_row:
                    yield first, rows, num_bytes, (first + len(rows)) / total
            at += batch.num_rows


def _split_batch(
    first_row: int, batch: Any, columns: Sequence[str], batch_bytes: int
) -> Iterator[tuple[int, Rows, int]]:
    """Split a pyarrow record batch into parts of about batch_bytes of text; yield (number of the first row, rows, bytes
    of their texts). Texts that a dictionary stores once can make a batch far larger than it is in the file.
    """
    rows: Rows = []
    num_bytes = 0
    for row in zip(*(_column_texts(batch.column(name)) for name in columns), strict=True):
        rows.append(row)
        num_bytes += sum(len(text) for text in row if text is not None)
        if num_bytes >= batch_bytes:
            yield first_row, rows, num_bytes
            first_row, rows, num_bytes = first_row + len(rows), [], 0
    if rows:
        yield first_row, rows, num_bytes


def _column_texts(column: Any) -> Iterator[Text]:
    """Return an iterator over the texts of a dictionary-encoded pyarrow column: None for null, bytes for invalid UTF-8.
    Raise IndexError if an index is outside the dictionary.
    """
    try:
        texts = column.dictionary.to_pylist()
    except UnicodeDecodeError:
        large = "large_binary" if str(column.dictionary.type).startswith("large") else "binary"
        texts = [_decode_or_bytes(data) for data in column.dictionary.view(large).to_pylist()]
    indices = column.indices.to_pylist()
    # because: the library does not check indices against the dictionary, and Python accepts negative ones
    if any(not 0 <= index < len(texts) for index in indices if index is not None):
        raise IndexError("a row refers to a text outside the dictionary of its column")
    return (None if index is None else texts[index] for index in indices)


def _decode_or_bytes(data: bytes | None) -> Text:
    """Return UTF-8 data as text; data that is not valid UTF-8, and None, are returned unchanged."""
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return data


def _check_columns(schema: Any, columns: Sequence[str], path: Path, pyarrow: Any, key_option: str) -> None:
    """Raise DataError if one of these columns is missing in the schema of a .parquet file or does not hold text."""
    for name in columns:
        if name not in schema.names:
            names = ", ".join(schema.names)
            raise DataError(f"{path} has no column {name!r}, only {names}. Name one with {key_option}.")
        kind = schema.field(name).type
        value_type = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(value_type) or pyarrow.types.is_large_string(value_type)):
            raise DataError(f"{path} has {value_type}, not text, in its column {name!r}. Name another with "
                            f"{key_option}.")  # fmt: skip


def _import_package(name: str, suffix: str) -> Any:
    """Import the module `name` of an optional package, which files with this suffix need. Raise UsageError if it is not
    installed; `suffix` is also the name of the extra that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f".{suffix} files need the package {name.partition('.')[0]}. "
            f"Install it with `{install_command(suffix)}`."
        ) from error
