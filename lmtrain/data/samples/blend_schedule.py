"""Which dataset each position of a blend takes: after any number of positions no count is off by one. Torch-free.

Called by blend.py. The rule is that of fair scheduling: sample j of a dataset with the share w may come from position
j / w on and must have come before (j + 1) / w is past; of those that may come the one that must come first is taken.
That such a choice never comes too late is a theorem (Steiner and Yeomans, 1993), and it is tested. Where a position
stands follows from the shares alone; it is computed forward from the nearest known counts, 15 ns a position in csrc/
and a microsecond in the twin.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from lmtrain import native

Int64s = NDArray[np.int64]

FINEST = 1 << 40  # because: larger sums of shares would not fit the compiled twin's arithmetic
BLOCK = 1 << 18  # positions between two counts that are kept


def whole_shares(weights: Sequence[float | int | Fraction]) -> list[int]:
    """Whole numbers in the proportions of the weights, all above 0: exactly, unless that takes more than 2^40."""
    exact = [Fraction(repr(w)) if isinstance(w, float) else Fraction(w) for w in weights]  # 0.1 is a tenth
    unit = math.lcm(*(share.denominator for share in exact))
    shares = [int(share * unit) for share in exact]
    divisor = math.gcd(*shares)
    shares = [share // divisor for share in shares]
    total = sum(shares)
    if total <= FINEST:
        return shares
    floors = [max(share * FINEST // total, 1) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda d: (-(shares[d] * FINEST % total), d))
    for d in by_rest[: max(FINEST - sum(floors), 0)]:
        floors[d] += 1
    return floors


class Schedule:
    """Position -> (dataset, which of its samples). After sum(shares) positions it begins anew."""

    def __init__(self, shares: Sequence[int]) -> None:
        total = sum(shares)
        times = max(BLOCK // total, 1)  # a short period is as good several times in a row, and faster
        self.shares = np.array(shares, np.int64) * times
        self.period = total * times
        self._counts = [np.zeros(len(shares), np.int64)]  # at positions 0, BLOCK, 2 BLOCK, ... of a period
        self._block: tuple[int, NDArray[np.int32], Int64s] = (-1, np.empty(0, np.int32), np.empty(0, np.int64))

    def take(self, first: int, count: int) -> tuple[NDArray[np.int32], Int64s]:
        """(dataset, sample) of each of these positions; a dataset's samples come in order, through all its epochs."""
        datasets, samples = [], []
        while count > 0:
            periods, at = divmod(first, self.period)
            number, skip = divmod(at, BLOCK)
            which, sample = self._read(number)
            now = min(count, len(which) - skip)
            part = which[skip : skip + now]
            datasets.append(part)
            samples.append(sample[skip : skip + now] + periods * self.shares[part])
            first, count = first + now, count - now
        if not datasets:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        return np.concatenate(datasets), np.concatenate(samples)

    def counts_at(self, position: int) -> list[int]:
        """How many samples each dataset has given before this position."""
        periods, at = divmod(position, self.period)
        number, rest = divmod(at, BLOCK)
        counts = self._known(number)
        if rest:
            counts = run(self.shares, counts, number * BLOCK, rest, keep=False)[2]
        return [int(count) for count in counts + periods * self.shares]

    def _known(self, number: int) -> Int64s:
        """Counts at the start of a block, from those of the blocks before it."""
        while len(self._counts) <= number:
            start = (len(self._counts) - 1) * BLOCK
            self._counts.append(run(self.shares, self._counts[-1], start, BLOCK, keep=False)[2])
        return self._counts[number]

    def _read(self, number: int) -> tuple[NDArray[np.int32], Int64s]:
        if self._block[0] != number:
            start = number * BLOCK
            made = run(self.shares, self._known(number), start, min(BLOCK, self.period - start), keep=True)
            self._block = number, made[0], made[1]
            if number + 1 == len(self._counts):
                self._counts.append(made[2])
        return self._block[1], self._block[2]


Taken = tuple[NDArray[np.int32], Int64s, Int64s]


def run(shares: Int64s, counts: Int64s, start: int, count: int, *, keep: bool) -> Taken:
    """From these counts at `start`: dataset and sample of each position (if they are to be kept), the counts after."""
    if native.lib is not None:
        taken: Taken = native.lib.blend(shares, counts, start, count, keep)
        return taken
    return run_twin(shares, counts, start, count, keep=keep)


def run_twin(shares: Int64s, counts: Int64s, start: int, count: int, *, keep: bool) -> Taken:
    """The same with two heaps: what may not come yet, and what may, by when it must."""
    parts, given = [int(share) for share in shares], [int(c) for c in counts]
    total = sum(parts)
    later = [(given[d] * total // parts[d], d) for d in range(len(parts))]
    ready: list[tuple[int, int]] = []
    heapq.heapify(later)
    datasets, samples = [], []
    for position in range(start, start + count):
        while later and later[0][0] <= position:
            d = heapq.heappop(later)[1]
            heapq.heappush(ready, (((given[d] + 1) * total - 1) // parts[d], d))
        d = heapq.heappop(ready)[1]
        datasets.append(d)
        samples.append(given[d])
        given[d] += 1
        heapq.heappush(later, (given[d] * total // parts[d], d))
    kept = (datasets, samples) if keep else ([], [])
    return np.array(kept[0], np.int32), np.array(kept[1], np.int64), np.array(given, np.int64)
