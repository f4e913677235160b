"""How the numbers of a tensor are spread: how many lie in each of the same buckets, whatever the tensor.

Filled by lmtrain/parallel/histograms.py, read by the sinks. The edges are powers of the square root of 2, so that what
ranks have counted apart can be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LOWEST, _HIGHEST = -80, 32  # half powers of 2: 1e-12 to 65,536
_UPWARD = [2 ** (half / 2) for half in range(_LOWEST, _HIGHEST + 1)]
EDGES = (*(-edge for edge in reversed(_UPWARD)), *_UPWARD)  # numbers nearer to 0 than the lowest share one bucket


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
