"""The measures of a run by the names that TensorBoard shows, and the value of each step by one of them.

Called by training as rows are written and when a run resumes, by code that looks for a run's best checkpoint, and by
whatever draws, prints or exports a row's numbers. observe/screen/metrics_row_text.py makes the text of a step's line.
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
AVERAGE_KEY = "ema"  # key of a row's entry with the measures of the weights' average
AVERAGE_PREFIX = f"{AVERAGE_KEY}/"  # in eval/NAME/ema/MEASURE
RESERVED_DOMAINS = ("loss", *_QUALITY)  # because: a domain of this name would be ambiguous


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
        """Return (lower edge, upper edge, number of elements) for each bucket of the histogram, from the lowest bucket
        that has elements to the highest; buckets between them may be empty. The histogram must have at least one
        element.
        """
        edges = [min(self.low, EDGES[0]), *EDGES, max(self.high, EDGES[-1])]
        filled = [i for i, count in enumerate(self.counts) if count]
        return [(edges[i], edges[i + 1], self.counts[i]) for i in range(filled[0], filled[-1] + 1)]


def row_measures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return measure name -> value for a validation or evaluation row of metrics.jsonl. Names are `loss/valid`,
    `valid/ppl`, `loss/valid/DOMAIN` or `eval/NAME/MEASURE`; of an average of the weights `loss/ema`, `ema/ppl`,
    `loss/ema/DOMAIN` or `eval/NAME/ema/MEASURE`.

    Rows of other events have none. Values that are not numbers are left out.
    """
    average, measures = row.get(AVERAGE_KEY), dict[str, Any]()
    if row["event"] == "eval":
        of_average = [(f"{AVERAGE_PREFIX}{measure}", value) for measure, value in _items(average)]
        measures = {
            f"eval/{row.get('name')}/{measure}": value for measure, value in [*_items(row.get("measures")), *of_average]
        }
    elif row["event"] == "valid":
        measures = _validation_measures(row, "valid") | _validation_measures(dict(_items(average)), AVERAGE_KEY)
    return {name: float(value) for name, value in measures.items() if type(value) in (int, float)}


def _validation_measures(values: Mapping[str, Any], word: str) -> dict[str, Any]:
    """Return measure name -> value for the values of a validation, with `word` in the names: `loss/WORD`, `WORD/ppl`,
    `loss/WORD/DOMAIN`.
    """
    measures: dict[str, Any] = {}
    for domain, of_domain in [("", values), *_items(values.get("domains"))]:
        suffix = f"/{domain}" if domain else ""
        measures |= {f"loss/{word}{suffix}": value for key, value in _items(of_domain) if key == "loss"}
        measures |= {
            f"{word}{suffix}/{key}": value for key, value in _items(of_domain) if "/" in key or key in _QUALITY
        }
    return measures


def source_measures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return measure name -> value for the sources of a step row of metrics.jsonl: `loss/train/NAME`, `tokens/NAME` and
    `epochs/NAME`, NAME being a dataset of the blend, or "rest". Values that are not numbers are left out.
    """
    names = {"loss": "loss/train", "tokens": "tokens", "epochs": "epochs"}
    return {
        f"{names[key]}/{source}": float(value)
        for source, values in _items(row.get("sources"))
        for key, value in _items(values)
        if key in names and type(value) in (int, float)
    }


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else []


def validation_measure_names(
    terms: Sequence[str], domains: Iterable[str], *, of_average: bool = False
) -> list[str]:
    """Return the names that `row_measures` gives the measures of a validation row, such as "loss/valid". `terms` are
    the names of the model's loss terms, `domains` those of the validation data. With `of_average` return the names of
    the measures of the averaged weights.
    """
    values = dict.fromkeys(["loss", *_QUALITY, *term_measure_names(terms)], 0.0)
    return list(_validation_measures(
        {**values, "domains": dict.fromkeys(domains, values)}, AVERAGE_KEY if of_average else "valid"
    ))  # fmt: skip


def term_measure_names(terms: Sequence[str]) -> list[str]:
    """Return the row keys of the terms of a loss (`loss/TERM`) and of the accuracies of all terms but the first
    (`accuracy/TERM`); empty for a loss of one term.
    """
    return [f"loss/{term}" for term in terms if len(terms) > 1] + [f"accuracy/{term}" for term in terms[1:]]


def larger_is_better(name: str) -> bool:
    """Return True if the measure `name` is an accuracy. All other measures are losses or perplexities, of which smaller
    ones are better.
    """
    first, *_, last = words = name.split("/")
    return "accuracy" in last if first == "eval" else "accuracy" in words


def score_by_step(rows: Iterable[Mapping[str, Any]], name: str) -> dict[int, float]:
    """Return step -> value of the measure `name`, such as "loss/valid", for all metrics rows that have it. Values are
    negated if smaller is better, so that the largest value is the best.

    Rows without the measure and NaN values are left out.
    """
    sign = 1 if larger_is_better(name) else -1
    values = {row["step"]: measures[name] for row in rows if name in (measures := row_measures(row))}
    return {step: sign * value for step, value in values.items() if not math.isnan(value)}
