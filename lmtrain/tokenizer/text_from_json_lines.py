r"""JSON lines: extracts the text under a key of every line, and states why a line is bad.

Called by bulk_encoding.py and data_tools. The rules: one JSON object per line, the key once at the top level, its
value a string. Lines end only at "\n"; blank lines are not documents. csrc/json_lines.cpp extracts the same texts
faster; the cause of a bad line always comes from this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmtrain.runtime import compiled_helpers
from lmtrain.runtime.files.atomic_files import is_nested_deeper

Text = bytes | str
Document = dict[str, Any]  # a text and the other fields of its line
Pairs = list[tuple[str, Any]]
MAX_DEPTH = 256  # levels of brackets; because: Python's own limit depends on its version and on the caller's stack
MAX_DIGITS = 4300  # of an integer; because: Python's default limit, which an environment variable can change
MAX_WORD_BYTES = 4 << 20  # without white space; because: merging a word takes about thirty times its size
BOM = b"\xef\xbb\xbf"  # byte order mark: allowed at the start of a file, invalid JSON elsewhere
_WORD_OR_SPACE = re.compile(rb"\s+|\S+")


class Reject(NamedTuple):
    """A line or document that cannot be used."""

    item: int  # offset of the line's first byte in the slice, or the document's number
    offset: int  # offset of the wrong byte in the slice, or in the document
    cause: str


class JsonLines(NamedTuple):
    """The valid texts as UTF-8, the offsets of their lines in the slice, and the bad lines."""

    documents: list[bytes]
    starts: list[int]
    rejects: list[Reject]


class BadTextError(Exception):
    """Raised within the tokenizer package for a bad text; callers receive a Reject."""

    def __init__(self, offset: int, cause: str) -> None:
        super().__init__(cause)
        self.offset, self.cause = offset, cause


def split_lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (offset of the line's first byte, line without its newline) for every line of `data` that is not blank."""
    start = 0
    while start < len(data):
        stop = data.find(b"\n", start)
        stop = len(data) if stop < 0 else stop
        if (line := data[start:stop]) and line.strip():
            yield start, line
        start = stop + 1


def read_jsonl(data: bytes, key: str) -> JsonLines:
    """Return the texts under `key` in `data`, which holds whole JSON lines, as UTF-8 bytes, with the offset of each
    text's line in `data` and a Reject for each bad line.
    """
    if compiled_helpers.lib is None:
        return read_jsonl_twin(data, key)
    documents, starts, bad = compiled_helpers.lib.read_jsonl(data, key.encode("utf-8", "surrogatepass"))
    return JsonLines(documents, starts.tolist(), build_rejects(data, key, bad))


def read_jsonl_twin(data: bytes, key: str) -> JsonLines:
    """Return the text under `key` in each line of `data`, and the lines that are bad, as `read_jsonl` does. Used where
    the compiled extension is missing.
    """
    result = JsonLines([], [], [])
    for start, line in split_lines(bytes(data)):
        try:
            result.documents.append(extract_text(line, key).encode())
            result.starts.append(start)
        except BadTextError as error:
            result.rejects.append(Reject(start, start + error.offset, error.cause))
    return result


def build_rejects(data: bytes, key: str, bounds: NDArray[np.int64]) -> list[Reject]:
    """Return a Reject for each line of `data` that the compiled reader rejected. `bounds` lists the start and end
    offset of each such line.
    """
    view = memoryview(data)
    return [build_reject(start, start, bytes(view[start:stop]), key) for start, stop in bounds.reshape(-1, 2).tolist()]


def build_reject(item: int, start: int, source: Text, key: str | None) -> Reject:
    """Return a Reject with the cause for which the compiled reader rejected `source`, a text or (with a `key`) a JSON
    line. `item` is stored in the Reject; `start` is added to the offset of the wrong byte.

    Raise RuntimeError if the Python code finds nothing wrong.
    """
    try:
        extract_text(source, key)
    except BadTextError as error:
        return Reject(item, start + error.offset, error.cause)
    raise RuntimeError(f"The compiled JSON reader rejects a text that the Python reader accepts: {source[:200]!r}")


def extract_text(source: Text, key: str | None) -> str:
    """Return the text of a document. With a `key`, `source` is a JSON line and its text is the value of that key. Raise
    BadTextError if it is not valid.
    """
    if key is not None:
        assert isinstance(source, bytes)
        text: str = parse_document(source, key)[key]
        return text
    text = source if isinstance(source, str) else decode_utf8(source)
    check_text(text)
    return text


def parse_document(line: bytes, key: str | None) -> Document:
    """Parse a JSON line and return its object. Raise BadTextError if the line is not a JSON object or, with a `key`, if
    the object has not exactly one such key with a valid text.
    """
    text = decode_utf8(line)
    outermost: Pairs = []  # pairs of the last object to end, which is the outermost

    def remember(pairs: Pairs) -> Document:
        nonlocal outermost
        outermost = pairs
        return dict(pairs)

    try:
        if text.count("[") + text.count("{") > MAX_DEPTH and is_nested_deeper(_loads(text, _values), MAX_DEPTH):
            raise RecursionError
        value = _loads(text, remember)
    except json.JSONDecodeError as error:
        raise BadTextError(len(text[: error.pos].encode()), f"not valid JSON ({error.msg})") from error
    except ValueError as error:  # raised for NaN and for integers of more than MAX_DIGITS digits
        raise BadTextError(0, f"not valid JSON ({error})") from error
    except RecursionError as error:
        raise BadTextError(0, f"not valid JSON (it nests deeper than {MAX_DEPTH} levels)") from error
    if not isinstance(value, dict):
        raise BadTextError(0, "not a JSON object")
    if key is not None:
        num_keys = sum(name == key for name, _ in outermost)
        if num_keys != 1:
            raise BadTextError(0, f"the key {key!r} appears twice" if num_keys else f"no key {key!r}")
        if not isinstance(value[key], str):
            raise BadTextError(0, f"the value of {key!r} is not text")
        check_text(value[key])
    return value


def _loads(text: str, to_object: Callable[[Pairs], Any]) -> Any:
    """Parse JSON; `to_object` converts the pairs of each object. Raise ValueError for NaN or a huge integer."""
    return json.loads(text, object_pairs_hook=to_object, parse_constant=_raise_constant, parse_int=_parse_int)


def decode_utf8(data: bytes) -> str:
    """Decode UTF-8. Raise BadTextError if it is invalid."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadTextError(error.start, "invalid UTF-8") from error


def check_text(text: str) -> None:
    """Raise BadTextError if a text holds a lone surrogate, or a stretch of more than 4 MiB that is all white space or
    has no white space.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise BadTextError(0, "the text holds a lone surrogate, which is no character") from error
    if len(data) > MAX_WORD_BYTES:
        for stretch in _WORD_OR_SPACE.finditer(data):
            if stretch.end() - stretch.start() > MAX_WORD_BYTES:
                raise BadTextError(stretch.start(), f"a word longer than {MAX_WORD_BYTES >> 20} MiB")


def _values(pairs: Pairs) -> list[Any]:
    """Return an object's values in order, including both values of a repeated key."""
    return [value for _, value in pairs]


def _raise_constant(name: str) -> None:
    """Raise ValueError for NaN or Infinity."""
    raise ValueError(f"{name} is not allowed in JSON")


def _parse_int(digits: str) -> int:
    """Parse an integer. Raise ValueError if it has more than MAX_DIGITS digits."""
    if len(digits.removeprefix("-")) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(digits)


