"""How much a pickle may ask for and make, before it is made. Called by the reading of pickles.

A pickle of a few hundred bytes can name the same list a million times, or itself; one of a gigabyte can be zeroes. What
is honest is far from these bounds: a tensor takes some 140 bytes of a pickle and 3 KB of what may be made.
"""

from __future__ import annotations

from typing import Any, Protocol

MAX_PICKLE_BYTES = 64 << 20
MAX_MADE_BYTES = 256 << 20  # of Python's objects, by their rough sizes; so there are at most 6 million instructions
MAX_NUMBER_BITS = 256  # because: states of random numbers have 128, and nothing has more
MAX_KEY = 1 << 32  # because: numbers can be chosen so that a dict of them takes forever
MAX_KEY_PARTS = 16
MAX_DEPTH = 100
_MAX_LINE = 1 << 20


class Lines(Protocol):
    """What pickletools asks of a file."""

    def read(self, size: int, /) -> bytes: ...

    def readline(self, size: int, /) -> bytes: ...


class Measured:
    """A file whose next pickle ends within bounds, whatever lengths the pickle claims."""

    def __init__(self, file: Lines) -> None:
        self._file, self._left = file, MAX_PICKLE_BYTES

    def read(self, size: int) -> bytes:
        if size > self._left:
            raise ValueError(f"it asks for {size} bytes, and a pickle here has at most {MAX_PICKLE_BYTES}")
        data = self._file.read(size)
        self._left -= len(data)
        return data

    def readline(self) -> bytes:
        line = self._file.readline(min(_MAX_LINE, self._left))
        self._left -= len(line)
        return line


def checked_text(value: Any, what: str) -> str:
    """A text where one belongs. Nothing else is made one, since writing out what is nested may never end."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is a {type(value).__name__} and not a text")
    return value
