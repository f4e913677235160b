"""What a run has measured of itself, by the names that TensorBoard shows, and what each step is worth by one of them.

Called by training as rows are written and when a run goes on, and by whoever looks for a run's best checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_QUALITY = ("ppl", "accuracy")
DOMAIN_WORDS = ("loss", *_QUALITY)  # no domain can be called so, since names would be ambiguous


def measures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Of a row of validation `loss/valid`, `valid/ppl`, `loss/valid/DOMAIN`; of an evaluation `eval/NAME/MEASURE`."""
    if row["event"] == "eval":
        return {f"eval/{row['name']}/{measure}": value for measure, value in row["measures"].items()}
    if row["event"] != "valid" or "loss" not in row:
        return {}
    found: dict[str, float] = {}
    for domain, values in ({"": row} | row.get("domains", {})).items():
        below = f"/{domain}" if domain else ""
        found[f"loss/valid{below}"] = values["loss"]
        found |= {f"valid{below}/{key}": value for key, value in values.items() if "/" in key or key in _QUALITY}
    return found


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
    return {step: sign * value for step, value in taken.items() if value is not None and not math.isnan(value)}
