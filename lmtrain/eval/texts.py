"""Reading the texts that are evaluated on, byte for byte. Called by the tasks; torch-free."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from lmtrain.errors import DataError, MissingInputError
from lmtrain.runtime.files import parse_json


@dataclass(frozen=True)
class TextInput:
    """Documents that whoever calls has read, for files of text are read in one way everywhere. `name` is for people."""

    name: str
    documents: list[str]
    sha256: str
    sha256_of: str


def read_text_file(source: Path) -> tuple[str, str]:
    """A file's text, with no newline translated, and its SHA-256."""
    try:
        data = source.read_bytes()
        return data.decode("utf-8"), hashlib.sha256(data).hexdigest()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise MissingInputError(f"--data={source} is not a file. Give the text that the task names.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{source} is not UTF-8 at byte {error.start}. Give the text as it was published.") from error


def jsonl_texts(content: str, source: Path) -> list[str]:
    """The `text` of every line that is not blank."""
    texts = []
    for number, line in enumerate(content.split("\n"), 1):  # because: splitlines would cut at U+2028 inside a string
        if not line.strip():
            continue
        try:
            text = parse_json(line, source)["text"]
        except (DataError, KeyError, TypeError) as error:
            raise _no_text(source, number) from error
        if not isinstance(text, str):
            raise _no_text(source, number)
        texts.append(text)
    return texts


def _no_text(source: Path, number: int) -> DataError:
    return DataError(f'{source} line {number} is not JSON with a "text". Give one {{"text": ...}} a line.')
