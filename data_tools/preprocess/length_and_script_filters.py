"""Document filters: by length, by script, by user-defined functions. Called by workers.

A filter is a name and a function of the text; a dropped document is counted under the first filter that rejects it.
User-defined functions are entry points of an installed package in the group `lmtrain.filters`, named on the command
line; no file can name code.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_tools.writing_systems import check_script, script_shares
from lmtrain.errors import DataError, UsageError, spelling_hint, way

GROUP = "lmtrain.filters"
KeepFunction = Callable[[str], bool]


@dataclass(frozen=True)
class Filters:
    """Requested filters; None and empty mean no filter. Lengths in tokens exclude the end-of-document token."""

    min_chars: int | None = None
    max_chars: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    scripts: tuple[tuple[str, float], ...] = ()  # (script, least share of letters in it)
    entry_points: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for unit in ("chars", "tokens"):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if low is not None and high is not None and low > high:
                swapped = way(f"--min-{unit}", str(high), f"--max-{unit}", str(low))
                raise UsageError(f"--min-{unit}={low} is more than --max-{unit}={high}. Use {swapped}, or only one.")
        for name, _ in self.scripts:
            check_script(name)

    @property
    def needs_text(self) -> bool:
        """True if any filter needs the texts themselves."""
        return bool(self.min_chars or self.max_chars is not None or self.scripts or self.entry_points)

    @property
    def needs_token_counts(self) -> bool:
        """True if any filter needs the number of tokens."""
        return bool(self.min_tokens or self.max_tokens is not None)

    def build_text_filters(self) -> Iterator[tuple[str, KeepFunction]]:
        """Yield (name, function) of the requested text filters, cheapest first; the function returns True to keep."""
        if (low := self.min_chars) is not None:
            yield "min_chars", lambda text: len(text) >= low
        if (high := self.max_chars) is not None:
            yield "max_chars", lambda text: len(text) <= high
        for name, share in self.scripts:
            yield f"script {name}", _script_filter(name, share)
        for name in self.entry_points:
            yield f"filter {name}", _wrap_user_filter(name, _find_entry_point(name).load())

    def classify_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int8]:
        """Return an int8 per document from its number of tokens in `lengths`: 0 if it is allowed, 1 if it is below
        min_tokens, 2 if it is above max_tokens.
        """
        verdict = np.zeros(len(lengths), np.int8)
        if self.min_tokens is not None:
            verdict[lengths < self.min_tokens] = 1
        if self.max_tokens is not None:
            verdict[lengths > self.max_tokens] = 2
        return verdict

    def identity(self) -> dict[str, Any]:
        """Return option -> value of all that decides which documents are kept, with the versions of installed filters.
        A killed run is resumed only by a run with equal ones.
        """
        installed = [
            (point.name, point.value, point.dist.version if point.dist else "")
            for point in map(_find_entry_point, self.entry_points)
        ]
        return {
            "--min-chars": self.min_chars, "--max-chars": self.max_chars, "--min-tokens": self.min_tokens,
            "--max-tokens": self.max_tokens, "--script": [f"{name}:{share:g}" for name, share in self.scripts],
            "--filter": list(self.entry_points), "installed filters": installed,
        }  # fmt: skip


def parse_script(text: str) -> tuple[str, float]:
    """Parse the value of --script, `NAME` or `NAME:SHARE`, into (script, least share of letters in it). The share is
    0.9 if left out.
    """
    name, _, share = text.partition(":")
    try:
        least_share = float(share) if share else 0.9
    except ValueError:
        least_share = -1.0
    if not 0 < least_share <= 1:
        raise UsageError(f"--script {text} needs a share above 0 and at most 1. Give one, as in latin:0.9.")
    return name.lower(), least_share


def _script_filter(name: str, share: float) -> KeepFunction:
    """Return a filter that keeps texts with at least this share of letters in a script."""
    return lambda text: script_shares(text).get(name, 0.0) >= share


def _find_entry_point(name: str) -> importlib.metadata.EntryPoint:
    """Return the entry point of the user-defined filter with this name. Raise UsageError if no installed package has
    it.
    """
    entry_points = importlib.metadata.entry_points(group=GROUP)
    if name not in entry_points.names:
        hint = spelling_hint(name, entry_points.names, lambda meant: way(meant, instead_of=name))
        raise UsageError(f"--filter {name} is not installed: no package has that entry point of group {GROUP}. {hint}")
    return entry_points[name]


def _wrap_user_filter(name: str, function: Any) -> KeepFunction:
    """Return a filter that calls the user-defined `function` and raises DataError, with the filter's name, if it fails
    or returns no bool. Raise UsageError if `function` cannot be called.
    """
    if not callable(function):
        raise UsageError(f"--filter {name} is a {type(function).__name__}, which cannot be called. Name a function.")

    def keep(text: str) -> bool:
        try:
            answer = function(text)
        except Exception as error:
            raise DataError(f"--filter {name} failed ({type(error).__name__}: {error}). Repair the filter.") from error
        if not isinstance(answer, (bool, np.bool_)):
            raise DataError(f"--filter {name} returned {answer!r}. It must return True to keep a text, or False.")
        return bool(answer)

    return keep
