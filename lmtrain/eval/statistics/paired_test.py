"""How far a measure may be chance, and the difference of two models on the same items. Torch-free.

Called by the runner for a measure's interval, and by `lmtrain eval --compare`. There both models are resampled alike,
so that what is hard for both cancels out: a difference is surer than either number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError
from lmtrain.eval.task import Columns, Result, Task, finite

RESAMPLES = 1000
LEVEL = 0.95
SEED = 0
MOST_UNITS = 10_000  # because: a thousand resamples of a million items take minutes, and of shares of them say the same
SAME = ("protocol", "protocol_version", "text_sha256", "limit", "stride", "prefix", "num_items")
_AT_ONCE = 50  # resamples; 10,000 items make 4 MB of counts

Table = Mapping[str, NDArray[np.float64]]
Measures = Callable[[Mapping[str, float]], dict[str, float]]
Interval = tuple[float, float]


def intervals(columns: Table, measures: Measures, resamples: int = RESAMPLES) -> dict[str, Interval]:
    """Of each measure the middle 95% of its resamples; none where there are fewer than two items."""
    drawn: dict[str, list[float]] = {}
    for sums in resampled_sums(columns, resamples):
        for name, value in measures(sums).items():
            drawn.setdefault(name, []).append(value)
    found = {name: middle(values) for name, values in drawn.items()}
    return {name: interval for name, interval in found.items() if interval is not None}


def middle(values: list[float]) -> Interval | None:
    """The values that enclose the middle 95%; None where there are none, or one is not a number."""
    if not values or np.isnan(values).any():
        return None
    edge = (1 - LEVEL) / 2
    low, high = np.quantile(values, [edge, 1 - edge], method="inverted_cdf")  # because: infinity is a value as well
    return float(low), float(high)


def resampled_sums(columns: Table, resamples: int = RESAMPLES) -> Iterator[dict[str, float]]:
    """The sums of every column over each resample. The same for the same number of items, whatever the columns say."""
    names = list(columns)
    table_IC = _units(np.stack([columns[name] for name in names], axis=1))
    num_units = len(table_IC)
    if num_units < 2:
        return
    random = np.random.default_rng(SEED)
    for first in range(0, resamples, _AT_ONCE):
        rows = min(_AT_ONCE, resamples - first)
        drawn = random.integers(0, num_units, (rows, num_units)) + num_units * np.arange(rows)[:, None]
        counts_RI = np.bincount(drawn.ravel(), minlength=rows * num_units).reshape(rows, num_units)
        for sums in counts_RI.astype(np.float64) @ table_IC:
            yield dict(zip(names, sums.tolist(), strict=True))


def _units(table_IC: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rows themselves, or, where there are too many, the sums of every 10,000th."""
    num_items = len(table_IC)
    if num_items <= MOST_UNITS:
        return table_IC
    units = np.zeros((MOST_UNITS, table_IC.shape[1]))
    np.add.at(units, np.arange(num_items) % MOST_UNITS, table_IC)
    return units


@dataclass(frozen=True)
class Side:
    name: str  # the results file or the checkpoint
    result: Result
    columns: Columns


@dataclass(frozen=True)
class Difference:
    a: float
    b: float
    difference: float  # b - a
    interval: Interval | None  # of the difference; none where there is one item

    @property
    def beyond_chance(self) -> bool:
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True)
class Comparison:
    task: str
    protocol: str
    headline: str
    data: str
    num_items: int
    differences: dict[str, Difference]
    left_out: tuple[str, ...]  # measures by token, where the tokenizers differ

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        for name, one in self.differences.items():
            plain["differences"][name]["beyond_chance"] = one.beyond_chance
        return {key: finite(value) for key, value in plain.items()}


def compare(task: Task, a: Side, b: Side, resamples: int = RESAMPLES) -> Comparison:
    check_same(a, b)
    ours, theirs = (task.measures({n: float(v.sum()) for n, v in side.columns.items()}) for side in (a, b))
    same_tokens = a.result.tokenizer_fingerprint == b.result.tokenizer_fingerprint
    shared = [name for name in ours if name in theirs]
    kept = [name for name in shared if same_tokens or "token" not in name]
    drawn: dict[str, list[float]] = {name: [] for name in kept}
    for x, y in zip(resampled_sums(a.columns, resamples), resampled_sums(b.columns, resamples), strict=True):
        of_x, of_y = task.measures(x), task.measures(y)
        for name in kept:
            drawn[name].append(of_y.get(name, math.nan) - of_x.get(name, math.nan))
    return Comparison(
        task=a.result.task,
        protocol=a.result.protocol,
        headline=a.result.headline,
        data=a.result.data,
        num_items=a.result.num_items,
        differences={
            name: Difference(ours[name], theirs[name], theirs[name] - ours[name], middle(drawn[name]))
            for name in kept
        },
        left_out=tuple(name for name in shared if name not in kept),
    )


def check_same(a: Side, b: Side) -> None:
    """Refuse what is not the same question, and say in what it differs."""
    differs = [
        f"{key} {getattr(a.result, key)} and {getattr(b.result, key)}"
        for key in SAME
        if getattr(a.result, key) != getattr(b.result, key)
    ]
    if not differs and not np.array_equal(a.columns["bytes"], b.columns["bytes"]):
        differs = ["bytes of the items"]
    if differs:
        raise DataError(
            f"{a.name} and {b.name} do not answer the same question: {'; '.join(differs)}. "
            "Evaluate both on the same file with the same options."
        )
