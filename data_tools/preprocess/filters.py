"""Which documents to leave out: by length, by script, by a function of the user's. Called by workers.

A filter is a name and a function of the text; the first that says no is what the document is counted under. Functions
of the user's are entry points of an installed package in the group `lmtrain.filters`, named on the command line; no
file can name code.
"""

from __future__ import annotations

import importlib.metadata
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError, UsageError, nearest

GROUP = "lmtrain.filters"
Keep = Callable[[str], bool]

# Unicode's blocks, joined where one script has several; because: the standard library knows no scripts
SCRIPTS: dict[str, tuple[tuple[int, int], ...]] = {
    "latin": ((0x41, 0x24F), (0x1E00, 0x1EFF), (0x2C60, 0x2C7F), (0xA720, 0xA7FF), (0xAB30, 0xAB6F), (0xFF21, 0xFF5A)),
    "greek": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "cyrillic": ((0x400, 0x52F), (0x1C80, 0x1C8F), (0x2DE0, 0x2DFF), (0xA640, 0xA69F)),
    "armenian": ((0x530, 0x58F),),
    "hebrew": ((0x590, 0x5FF), (0xFB1D, 0xFB4F)),
    "arabic": ((0x600, 0x6FF), (0x750, 0x77F), (0x870, 0x8FF), (0xFB50, 0xFDFF), (0xFE70, 0xFEFF)),
    "devanagari": ((0x900, 0x97F), (0xA8E0, 0xA8FF)),
    "bengali": ((0x980, 0x9FF),),
    "gurmukhi": ((0xA00, 0xA7F),),
    "gujarati": ((0xA80, 0xAFF),),
    "tamil": ((0xB80, 0xBFF),),
    "telugu": ((0xC00, 0xC7F),),
    "kannada": ((0xC80, 0xCFF),),
    "malayalam": ((0xD00, 0xD7F),),
    "sinhala": ((0xD80, 0xDFF),),
    "thai": ((0xE00, 0xE7F),),
    "lao": ((0xE80, 0xEFF),),
    "tibetan": ((0xF00, 0xFFF),),
    "myanmar": ((0x1000, 0x109F), (0xA9E0, 0xA9FF), (0xAA60, 0xAA7F)),
    "georgian": ((0x10A0, 0x10FF), (0x1C90, 0x1CBF), (0x2D00, 0x2D2F)),
    "hangul": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xA960, 0xA97F), (0xAC00, 0xD7FF)),
    "ethiopic": ((0x1200, 0x139F), (0x2D80, 0x2DDF), (0xAB00, 0xAB2F)),
    "khmer": ((0x1780, 0x17FF),),
    "kana": ((0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),
    "han": ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)),
}


@dataclass(frozen=True)
class Filters:
    """What is asked for; None and nothing ask for nothing. Lengths in tokens do not count the end token."""

    min_chars: int | None = None
    max_chars: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    scripts: tuple[tuple[str, float], ...] = ()  # of all letters at least this share stands in the script
    entry_points: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what in ("chars", "tokens"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if low is not None and high is not None and low > high:
                raise UsageError(f"--min-{what}={low} is more than --max-{what}={high}, so nothing is left. Swap them.")
        for name, _ in self.scripts:
            if name not in SCRIPTS:
                raise UsageError(f"--script {name} is no script that is known. {nearest(name, SCRIPTS)}")

    @property
    def of_text(self) -> bool:
        """Whether the texts themselves must be looked at."""
        return bool(self.min_chars or self.max_chars is not None or self.scripts or self.entry_points)

    @property
    def of_tokens(self) -> bool:
        return bool(self.min_tokens or self.max_tokens is not None)

    def build(self) -> list[tuple[str, Keep]]:
        """The filters of text, cheapest first."""
        return list(self._build())

    def _build(self) -> Iterator[tuple[str, Keep]]:
        if (low := self.min_chars) is not None:
            yield "min_chars", lambda text: len(text) >= low
        if (high := self.max_chars) is not None:
            yield "max_chars", lambda text: len(text) <= high
        for name, share in self.scripts:
            yield f"script {name}", _in_script(name, share)
        for name in self.entry_points:
            yield f"filter {name}", _careful(name, _find(name).load())

    def judge_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int8]:
        """0 for documents of a good length, 1 for those with too few tokens, 2 for those with too many."""
        verdict = np.zeros(len(lengths), np.int8)
        if self.min_tokens is not None:
            verdict[lengths < self.min_tokens] = 1
        if self.max_tokens is not None:
            verdict[lengths > self.max_tokens] = 2
        return verdict

    def identity(self) -> list[Any]:
        """All that decides what is kept, versions of installed filters too, so that a resumed run does the same."""
        installed = [(p.name, p.value, p.dist.version if p.dist else "") for p in map(_find, self.entry_points)]
        lengths = [self.min_chars, self.max_chars, self.min_tokens, self.max_tokens]
        return [lengths, list(self.scripts), installed]


def parse_script(text: str) -> tuple[str, float]:
    """`latin` asks for nine letters in ten; `latin:0.5` for half."""
    name, _, share = text.partition(":")
    try:
        wanted = float(share) if share else 0.9
    except ValueError:
        wanted = -1.0
    if not 0 < wanted <= 1:
        raise UsageError(f"--script {text}: the share must lie between 0 and 1. Write it as in latin:0.9.")
    return name.lower(), wanted


@lru_cache(1)
def _letter_table() -> NDArray[np.uint8]:
    """For every code point: 0 for what is no letter, else 1 + the number of its script, or 255 for any other."""
    letters = np.fromiter((unicodedata.category(chr(c))[0] == "L" for c in range(0x110000)), bool, 0x110000)
    table = np.where(letters, np.uint8(255), np.uint8(0))
    for number, blocks in enumerate(SCRIPTS.values(), 1):
        for first, last in blocks:
            part = table[first : last + 1]
            part[part == 255] = number
    return table


def share_in_script(text: str, script: str) -> float:
    """The share of a text's letters that stand in a script; 0 for a text without letters."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    found = np.bincount(_letter_table()[codes], minlength=256)
    letters = int(found[1:].sum())
    return int(found[1 + list(SCRIPTS).index(script)]) / letters if letters else 0.0


def _in_script(name: str, share: float) -> Keep:
    return lambda text: share_in_script(text, name) >= share


def _find(name: str) -> importlib.metadata.EntryPoint:
    found = importlib.metadata.entry_points(group=GROUP)
    if name not in found.names:
        known = nearest(name, found.names)
        raise UsageError(f"--filter {name} is no installed filter (entry points in the group {GROUP}). {known}")
    return found[name]


def _careful(name: str, function: Any) -> Keep:
    if not callable(function):
        raise UsageError(f"--filter {name} is {type(function).__name__}, which cannot be called. Name a function.")

    def keep(text: str) -> bool:
        try:
            answer = function(text)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"--filter {name} failed ({reason}). Repair the filter.") from error
        if not isinstance(answer, (bool, np.bool_)):
            raise DataError(f"--filter {name} answered {answer!r}. A filter answers True to keep a text, or False.")
        return bool(answer)

    return keep
