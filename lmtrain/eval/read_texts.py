"""Reading of evaluation texts, byte for byte. Called by the tasks; torch-free."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmtrain.errors import DataError, MissingInputError
from lmtrain.runtime.files.atomic_files import parse_json
from lmtrain.runtime.files.similar_path import missing_path


@dataclass(frozen=True)
class TextInput:
    """Documents that the caller has read, since text files are read in one way everywhere. `name` is for messages."""

    name: str
    documents: list[str]
    sha256: str
    sha256_of: str
    files: dict[str, int] = field(default_factory=dict)  # number of documents by file, in order


_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


def read_text_file(source: Path) -> tuple[str, str]:
    """Return the text of the UTF-8 file `source`, with newlines unchanged, and its SHA-256: both of what it holds if
    its suffix is .gz, .bz2 or .xz. Raise MissingInputError if the file does not exist, or DataError if it is damaged or
    not UTF-8.
    """
    if source.suffix == ".zst":
        raise DataError(
            f"--data={source} is compressed by zstd, and this task reads .gz, .bz2, .xz and plain files. Give the file "
            f"that `zstd -d {source}` makes."
        )
    try:
        with _OPENERS.get(source.suffix, open)(source, "rb") as file:
            data = file.read()
        return data.decode("utf-8"), hashlib.sha256(data).hexdigest()
    except (FileNotFoundError, IsADirectoryError) as error:
        hint = "Give the text that the task names."
        if not source.exists():
            raise MissingInputError(missing_path(source, hint, Path.is_file, option="--data=")) from error
        raise MissingInputError(f"--data={source} is not a file. {hint}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{source} is not UTF-8 at byte {error.start}. Give the text as it was published.") from error
    except _DAMAGED as error:
        raise DataError(f"{source} cannot be unpacked: {error}. Give a complete {source.suffix} file.") from error


def suffix_of_text(source: Path) -> str:
    """Return a file's suffix, without that of a compression: notes.txt.gz -> .txt."""
    return (source.with_suffix("") if source.suffix in _OPENERS else source).suffix


def count_odd_characters(*texts: str) -> dict[str, str | int]:
    """Count the carriage returns and byte order marks in `texts`, which are scored although they are hardly meant as
    text. Return note name -> count for the counts above 0.
    """
    counts = {
        "carriage_returns_scored_as_text": sum(text.count("\r") for text in texts),
        "byte_order_marks_scored_as_text": sum(text.startswith("\ufeff") for text in texts),
    }
    return {name: count for name, count in counts.items() if count}


def jsonl_texts(content: str, source: Path, key: str = "text") -> list[str]:
    """Return the text under `key` in each line of JSON in `content`, which was read from the file `source`. Blank lines
    are skipped; raise DataError for a line without such a text.
    """
    texts = []
    for number, line in enumerate(content.split("\n"), 1):  # because: splitlines would cut at U+2028 inside a string
        if not line.strip():
            continue
        try:
            text = parse_json(line, source)[key]
            if not isinstance(text, str):
                raise TypeError(f"the value of {key!r} is not a text")
        except (DataError, KeyError, TypeError) as error:
            raise DataError(
                f'{source} line {number} is not JSON with a "{key}". Give one {{"{key}": ...}} a line.'
            ) from error
        texts.append(text)
    return texts
