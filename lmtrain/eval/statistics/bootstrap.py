"""How far a measure may be off because the text has the items that it has: a bootstrap over items. Pure numpy.

Called by the runner for one model and by paired.py for two, which must be judged on the same resamples. Draws items
with replacement, as many as there are, adds up their columns and takes the measure of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
LEVEL = 0.95
SEED = 0
MOST_UNITS = 10_000  # because: a thousand resamples of a million items take minutes, and of shares of them say the same
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
    """The values that enclose the middle 95%; None where one is not a number."""
    if np.isnan(values).any():
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
