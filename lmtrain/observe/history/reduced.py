"""A long series as few points, in which every extreme stays where it was. Called by whoever draws a record."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Places = NDArray[np.intp]


def extremes(values: Numbers, most: int) -> Places:
    """Places of at most `most` values, in order: of equally long parts the lowest and the highest, and both ends.

    All of them where there are no more. Values are finite.
    """
    if len(values) <= most:
        return np.arange(len(values))
    borders = parts(len(values), max(most // 2 - 1, 1))
    found: set[int] = {0, len(values) - 1}
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        part = values[begin:end]
        found |= {begin + int(part.argmin()), begin + int(part.argmax())}
    return np.array(sorted(found), np.intp)


def means(values: Numbers, most: int) -> tuple[Places, Numbers]:
    """The mean of each of at most `most` equally long parts, and the place where the part ends."""
    borders = parts(len(values), min(len(values), most))
    if len(values) == 0:
        return np.empty(0, np.intp), np.empty(0)
    sums = np.add.reduceat(values, borders[:-1])
    return borders[1:] - 1, sums / np.diff(borders)


def parts(count: int, num_parts: int) -> NDArray[Any]:
    """Borders of `num_parts` parts, none of them empty where there are enough."""
    return (np.arange(num_parts + 1) * count // max(num_parts, 1)).astype(np.intp)


def smoothed(values: Numbers, fade: float) -> Numbers:
    """The running mean in which older values fade; the first values are not pulled to zero."""
    result, mean, weight = np.empty(len(values)), 0.0, 0.0
    for at, value in enumerate(values.tolist()):
        mean, weight = fade * mean + value, fade * weight + 1
        result[at] = mean / weight
    return result
