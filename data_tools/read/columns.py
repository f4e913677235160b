"""Rows of a .parquet file, the wanted columns only, a bounded number at a time. Called by chunks.py.

Needs the package pyarrow. Columns are read as their dictionaries where they have one, so that a text which stands a
million times in the file stands once in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lmtrain.errors import DataError, UsageError
from lmtrain.runtime.files.files import read_errors

_MOST_ROWS = 4096
Text = str | bytes | None  # bytes where they are no UTF-8, for whoever looks at texts to say so
Rows = list[tuple[Text, ...]]


def read_rows(
    path: Path, columns: Sequence[str], start: int, batch_bytes: int
) -> Iterator[tuple[int, Rows, int, float]]:
    """From a row on: the first row's number, rows, the bytes of their texts, the share of the file that is done."""
    pyarrow, parquet = _pyarrow()
    with read_errors(path):
        try:
            _check_columns(parquet.read_schema(path), columns, path, pyarrow)
            with parquet.ParquetFile(path, read_dictionary=list(columns)) as file:
                yield from _batches(file, columns, start, batch_bytes)
        except (pyarrow.ArrowException, OSError, IndexError, UnicodeDecodeError) as error:  # names are text too
            if isinstance(error, FileNotFoundError):
                raise
            raise DataError(f"{path} cannot be read as .parquet ({error}). It is damaged or another file.") from error


def _batches(file: Any, columns: Sequence[str], start: int, batch_bytes: int) -> Iterator[tuple[int, Rows, int, float]]:
    at, total = 0, max(file.metadata.num_rows, 1)
    for group in range(file.metadata.num_row_groups):
        about = file.metadata.row_group(group)
        num_rows = max(1, min(_MOST_ROWS, batch_bytes * about.num_rows // max(about.total_byte_size, 1)))
        if at + about.num_rows <= start:
            at += about.num_rows
            continue
        for batch in file.iter_batches(batch_size=num_rows, row_groups=[group], columns=list(columns)):
            stop = at + batch.num_rows
            for first, rows, num_bytes in _split(at, batch, columns, batch_bytes):
                if first >= start:
                    yield first, rows, num_bytes, (first + len(rows)) / total
            at = stop


def _split(at: int, batch: Any, columns: Sequence[str], batch_bytes: int) -> Iterator[tuple[int, Rows, int]]:
    """A batch in parts of about batch_bytes, for the texts of a dictionary weigh more than their numbers."""
    rows: Rows = []
    num_bytes = 0
    texts = [_texts(batch.column(name)) for name in columns]
    for row in zip(*texts, strict=True):
        rows.append(row)
        num_bytes += sum(len(text) for text in row if text is not None)
        if num_bytes >= batch_bytes:
            yield at, rows, num_bytes
            at, rows, num_bytes = at + len(rows), [], 0
    if rows:
        yield at, rows, num_bytes


def _texts(column: Any) -> Iterator[Text]:
    try:
        known = column.dictionary.to_pylist()
    except UnicodeDecodeError:
        large = "large_binary" if str(column.dictionary.type).startswith("large") else "binary"
        known = [_text(data) for data in column.dictionary.view(large).to_pylist()]
    indices = column.indices.to_pylist()
    # because: the library looks up what it is told to, also behind the dictionary's end, and -1 is the last for Python
    if any(not 0 <= index < len(known) for index in indices if index is not None):
        raise IndexError("a row is a text that the dictionary of its column does not have")
    return (None if index is None else known[index] for index in indices)


def _text(data: bytes | None) -> Text:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return data


def _check_columns(schema: Any, columns: Sequence[str], path: Path, pyarrow: Any) -> None:
    for name in columns:
        if name not in schema.names:
            raise DataError(f"{path} has no column {name!r}; it has {', '.join(schema.names)}. Name one with --key.")
        kind = schema.field(name).type
        value = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(value) or pyarrow.types.is_large_string(value)):
            raise DataError(f"{path}: the column {name!r} holds {value}, which is no text. Name another with --key.")


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            ".parquet files need the package pyarrow. Install it with `pip install 'lmtrain[parquet]'`."
        ) from error
    return pyarrow, pyarrow.parquet
