"""The measures of a run by the names that TensorBoard shows, and the value of each step by one of them.

Called by training as rows are written and when a run resumes, and by code that looks for a run's best checkpoint. The
text of a step's line is made in screen/row_text.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LOWEST, _HIGHEST = -80, 32  # powers of sqrt(2): 2^-40 (1e-12) to 2^16 (65,536)
_UPWARD = [2 ** (half / 2) for half in range(_LOWEST, _HIGHEST + 1)]
EDGES = (*(-edge for edge in reversed(_UPWARD)), *_UPWARD)  # values within +-1e-12 share one bucket
_QUALITY = ("ppl", "accuracy")
DOMAIN_WORDS = ("loss", *_QUALITY)  # reserved: a domain of this name would be ambiguous


@dataclass(frozen=True)
class Histogram:
    """A histogram of the finite elements of a tensor."""

    low: float
    high: float
    total: float
    total_of_squares: float
    counts: Sequence[int]  # below the first of EDGES, between two neighbours, above the last

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[float, float, int]]:
        """Return (lower edge, upper edge, count) in rising order, from the first bucket that is not empty to the
        last.
        """
        edges = [min(self.low, EDGES[0]), *EDGES, max(self.high, EDGES[-1])]
        found = [i for i, count in enumerate(self.counts) if count]
        return [(edges[i], edges[i + 1], self.counts[i]) for i in range(found[0], found[-1] + 1)]


def measures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row's measures by name: `loss/valid`, `valid/ppl`, `loss/valid/DOMAIN`, or `eval/NAME/MEASURE`.

    Rows of other events have none. Values that are not numbers are left out.
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
    """Return the names of the measures in a validation row, for a model with these loss terms and these domains."""
    each = dict.fromkeys(["loss", *_QUALITY, *validation_terms(terms)], 0.0)
    return list(measures_of({"event": "valid", **each, "domains": dict.fromkeys(domains, each)}))


def validation_terms(terms: Sequence[str]) -> list[str]:
    """Return the keys of the single loss terms and their accuracies; empty for a loss of one term."""
    return [f"loss/{term}" for term in terms if len(terms) > 1] + [f"accuracy/{term}" for term in terms[1:]]


def larger_is_better(name: str) -> bool:
    first, *_, last = words = name.split("/")
    return "accuracy" in last if first == "eval" else "accuracy" in words


def worth_by_step(rows: Iterable[Mapping[str, Any]], name: str) -> dict[int, float]:
    """Return the measure by step, with its sign set so that larger is better; NaN values are left out."""
    sign = 1 if larger_is_better(name) else -1
    taken = {row["step"]: found[name] for row in rows if name in (found := measures_of(row))}
    return {step: sign * value for step, value in taken.items() if not math.isnan(value)}
