"""Task i of n: which bytes of the input it reads, what its output is called. Called by chunks.py and corpus steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lmtrain.errors import UsageError


class Span(NamedTuple):
    """What a part has of a source."""

    start: int
    stop: int
    whole: bool  # the part has all of a source that can only be read from its beginning


@dataclass(frozen=True)
class Part:
    """Task `number` of `count`."""

    number: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if match is None or int(match[1]) >= int(match[2]):
            raise UsageError(f"--part={text} is not a part. Give i/n with i from 0 to n-1, such as 0/16.")
        return cls(int(match[1]), int(match[2]))

    @property
    def whole(self) -> bool:
        return self.count == 1

    def name(self, path: Path) -> Path:
        """Where this part of a file goes: a/b.jsonl -> a/b.part-00003-of-00016.jsonl."""
        if self.whole:
            return path
        stem, dot, rest = path.name.partition(".")
        return path.with_name(f"{stem}.part-{self.number:05d}-of-{self.count:05d}{dot}{rest}")

    def range(self, total: int) -> tuple[int, int]:
        return total * self.number // self.count, total * (self.number + 1) // self.count

    def spans(self, sizes: Sequence[int]) -> Iterator[Span]:
        """Of each source: a line belongs to the part that its first byte is in, and so does a whole source."""
        first, last = self.range(sum(sizes))
        base = 0
        for size in sizes:
            begins_here = first <= base and (base < last or self.number == self.count - 1)
            yield Span(max(first - base, 0), min(last - base, size), begins_here)
            base += size


WHOLE = Part()
