"""What a run has measured of itself, by the names that TensorBoard shows, and what each step is worth by one of them.

Called by training as rows are written and when a run goes on, and by whoever looks for a run's best checkpoint. The
words of a step's line are made in screen/row_text.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LOWEST, _HIGHEST = -80, 32  # half powers of 2: 1e-12 to 65,536
_UPWARD = [2 ** (half / 2) for half in range(_LOWEST, _HIGHEST + 1)]
EDGES = (*(-edge for edge in reversed(_UPWARD)), *_UPWARD)  # numbers nearer to 0 than the lowest share one bucket
_QUALITY = ("ppl", "accuracy")
DOMAIN_WORDS = ("loss", *_QUALITY)  # no domain can be called so, since names would be ambiguous


@dataclass(frozen=True)
class Histogram:
    """Of the numbers of a tensor that are finite."""

    low: float
    high: float
    total: float
    total_of_squares: float
    counts: Sequence[int]  # below the first of EDGES, between two of them, above the last

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[float, float, int]]:
        """(from, up to, how many), from the lowest number to the highest."""
        edges = [min(self.low, EDGES[0]), *EDGES, max(self.high, EDGES[-1])]
        found = [i for i, count in enumerate(self.counts) if count]
        return [(edges[i], edges[i + 1], self.counts[i]) for i in range(found[0], found[-1] + 1)]


def measures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Of a row of validation `loss/valid`, `valid/ppl`, `loss/valid/DOMAIN`; of an evaluation `eval/NAME/MEASURE`.

    What is no number, in a row that nobody wrote so, is left out.
    """
    found: dict[str, Any] = {}
    if row["event"] == "eval":
        found = {f"eval/{row.get('name')}/{measure}": value for measure, value in _items(row.get("measures"))}
    elif row["event"] == "valid":
        for domain, values in [("", row), *_items(row.get("domains"))]:
            below = f"/{domain}" if domain else ""
            found |= {f"loss/valid{below}": value for key, value in _items(values) if key == "loss"}
            found |= {f"valid{below}/{key}": value for key, value in _items(values) if "/" in key or key in _QUALITY}
    return {name: float(value) for name, value in found.items() if type(value) in (int, float)}


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else []


def names_of_validation(terms: Sequence[str], domains: Iterable[str]) -> list[str]:
    """Those that the rows of a model with these terms of the loss will have."""
    each = dict.fromkeys(["loss", *_QUALITY, *validation_terms(terms)], 0.0)
    return list(measures_of({"event": "valid", **each, "domains": dict.fromkeys(domains, each)}))


def validation_terms(terms: Sequence[str]) -> list[str]:
    """The keys in which a row tells terms apart: none for a loss of one term."""
    return [f"loss/{term}" for term in terms if len(terms) > 1] + [f"accuracy/{term}" for term in terms[1:]]


def larger_is_better(name: str) -> bool:
    first, *_, last = words = name.split("/")
    return "accuracy" in last if first == "eval" else "accuracy" in words


def worth_by_step(rows: Iterable[Mapping[str, Any]], name: str) -> dict[int, float]:
    """The measure at each step at which it was taken, turned so that more is better."""
    sign = 1 if larger_is_better(name) else -1
    taken = {row["step"]: found[name] for row in rows if name in (found := measures_of(row))}
    return {step: sign * value for step, value in taken.items() if not math.isnan(value)}
