"""Which text files to read, and the documents in a piece of them. Called by encode.py and `lmtrain tokenizer train`.

A .txt file is one document. A .jsonl file has one JSON object a line, whose text stands under a key. Lines end at
"\\n" alone: other characters that Unicode calls line ends, such as U+2028, are part of a text. Work is cut into
slices of bytes, so that large files spread over processes; a line belongs to the slice that its first byte is in.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.errors import DataError, MissingInputError, UsageError
from lmtrain.runtime.files import storage_errors

KINDS = (".txt", ".jsonl")
SLICE_BYTES = 8 << 20
_BOM = b"\xef\xbb\xbf"  # some editors begin a file with it; it is no text


@dataclass(frozen=True)
class Source:
    path: Path
    num_bytes: int


@dataclass(frozen=True)
class Slice:
    """Bytes start to stop of a file; of a .txt file always all."""

    path: Path
    start: int
    stop: int


def find_sources(inputs: Sequence[str | Path]) -> list[Source]:
    """The files that these files, folders and globs stand for, in the order given, folders sorted by path."""
    if not inputs:
        raise UsageError("No input was given. Give .txt or .jsonl files, folders of them, or globs.")
    paths = [path for given in inputs for path in _expand(Path(given))]
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise UsageError(f"{path} is given more than once. Give every file once.")
        seen.add(path.resolve())
    with storage_errors(paths[0], "Reading"):
        return [Source(path, path.stat().st_size) for path in paths]


def _expand(given: Path) -> list[Path]:
    if given.is_dir():
        found = sorted(p for p in given.rglob("*") if p.suffix in KINDS and p.is_file() and not _hidden(p, given))
        if not found:
            raise MissingInputError(f"{given} holds no .txt and no .jsonl file. Check the folder.")
        return found
    if given.exists():
        if given.suffix not in KINDS:
            raise UsageError(f"{given} is neither .txt nor .jsonl. Convert it, or rename it if it is one of them.")
        return [given]
    matches = sorted(Path(name) for name in glob.glob(str(given), recursive=True))  # Path.glob refuses absolute ones
    found = [p for p in matches if p.suffix in KINDS and p.is_file()]
    if not found:
        raise MissingInputError(f"{given} does not exist. Give .txt or .jsonl files, folders of them, or globs.")
    return found


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def cut(sources: Iterable[Source], slice_bytes: int = SLICE_BYTES) -> Iterator[list[Slice]]:
    """Portions of about slice_bytes: pieces of large .jsonl files, or many small files together."""
    portion: list[Slice] = []
    held = 0
    for source in sources:
        width = slice_bytes if source.path.suffix == ".jsonl" else max(source.num_bytes, 1)
        for start in range(0, max(source.num_bytes, 1), width):
            stop = min(start + width, source.num_bytes)
            portion.append(Slice(source.path, start, stop))
            held += stop - start
            if held >= slice_bytes or len(portion) >= 1024:
                yield portion
                portion, held = [], 0
    if portion:
        yield portion


def read_texts(piece: Slice, key: str) -> Iterator[str]:
    """The documents of a slice, in order. The first bad line stops with an error that says where and why."""
    with storage_errors(piece.path, "Reading"):
        if piece.path.suffix == ".txt":
            data = piece.path.read_bytes()
            body = data.removeprefix(_BOM)
            yield _decoded(body, piece.path, len(data) - len(body))
            return
        for offset, line in _lines(piece):
            if line.strip():
                yield _text_of(line.removesuffix(b"\n"), key, piece.path, offset)


def _lines(piece: Slice) -> Iterator[tuple[int, bytes]]:
    with open(piece.path, "rb") as file:
        at = piece.start
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1  # the rest of a line that began in the slice before
        while at < piece.stop:
            line = file.readline()
            if not line:
                return
            yield (at, line) if at or not line.startswith(_BOM) else (len(_BOM), line[len(_BOM) :])
            at += len(line)


def _text_of(line: bytes, key: str, path: Path, offset: int) -> str:
    text = _decoded(line, path, offset)
    try:
        value = json.loads(text, object_pairs_hook=_Pairs, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        at = offset + len(text[: error.pos].encode())
        raise _bad(path, at, f"not valid JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, NaN, nesting without end
        raise _bad(path, offset, f"not valid JSON ({error})") from error
    if not isinstance(value, _Pairs):
        raise _bad(path, offset, "not a JSON object")
    found = [v for k, v in value.pairs if k == key]
    if len(found) != 1:
        raise _bad(path, offset, f"the key {key!r} stands twice" if found else f"no key {key!r}")
    if not isinstance(found[0], str):
        raise _bad(path, offset, f"the value of {key!r} is not text")
    try:
        found[0].encode()
    except UnicodeEncodeError as error:
        raise _bad(path, offset, f"the value of {key!r} holds a lone surrogate, which is no character") from error
    return found[0]


class _Pairs:
    """A JSON object as the pairs it was written with, so that a key that stands twice is seen."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _decoded(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _bad(path, offset + error.start, "invalid UTF-8") from error


def _bad(path: Path, offset: int, cause: str) -> DataError:
    # The line's number is counted only now: a worker that reads the middle of a file does not know it.
    number, left = 1, offset
    with open(path, "rb") as file:
        while left > 0 and (data := file.read(min(left, 1 << 20))):
            number += data.count(b"\n")
            left -= len(data)
    return DataError(f"{path}:{number} (byte {offset}): {cause}. Repair or remove the line; nothing was written.")


class Texts:
    """All documents of these files, as often as one iterates."""

    def __init__(self, sources: Sequence[Source], key: str) -> None:
        self._sources, self._key = sources, key

    def __iter__(self) -> Iterator[str]:
        for portion in cut(self._sources):
            for piece in portion:
                yield from read_texts(piece, self._key)
