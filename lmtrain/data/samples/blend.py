"""A blend of several datasets: consecutive sample numbers over all datasets, and an order that mixes them by share.

Called by training_data.py. The schedule decides which dataset a position takes; the dataset's own order, epoch by
epoch, decides which of its samples. Both are pure functions of the seed and the position. numpy only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from lmtrain import native
from lmtrain.batch import Batch
from lmtrain.data.dataset import Counts, Dataset, Int64s, Order, SampleOrder, mix
from lmtrain.data.samples.megatron import blend_index
from lmtrain.errors import DataError

FINEST = 1 << 40  # because: larger sums of shares would overflow 64 bits in the compiled twin
BLOCK = 1 << 18  # positions between two stored counts
Taken = tuple[NDArray[np.int32], Int64s, Int64s]


def whole_shares(weights: Sequence[float | int | Fraction]) -> list[int]:
    """Return positive integers in the proportions of the weights, exact unless their sum would exceed 2^40."""
    exact = [Fraction(repr(w)) if isinstance(w, float) else Fraction(w) for w in weights]  # 0.1 is 1/10
    unit = Fraction(math.lcm(*(share.denominator for share in exact)))
    unit /= math.gcd(*(int(share * unit) for share in exact))
    shares = [int(share * unit) for share in exact]
    total = sum(shares)
    if total <= FINEST:
        return shares
    floors = [max(share * FINEST // total, 1) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda d: (-(shares[d] * FINEST % total), d))
    for d in by_rest[: max(FINEST - sum(floors), 0)]:
        floors[d] += 1
    return floors


class Schedule:
    """Mapping from a position to (dataset, sample of the dataset). Repeats after sum(shares) positions."""

    def __init__(self, shares: Sequence[int]) -> None:
        total = sum(shares)
        times = max(BLOCK // total, 1)  # several repeats of a short period are computed faster together
        self.shares = np.array(shares, np.int64) * times
        self.period = total * times
        self._counts = [np.zeros(len(shares), np.int64)]  # before positions 0, BLOCK, 2 BLOCK, ... of a period
        self._block: tuple[int, NDArray[np.int32], Int64s] = (-1, np.empty(0, np.int32), np.empty(0, np.int64))

    def take(self, first: int, count: int) -> tuple[NDArray[np.int32], Int64s]:
        """Return (dataset, sample) of `count` positions; a dataset's samples are consecutive through its epochs."""
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
        """Return how many samples of each dataset come before this position."""
        periods, at = divmod(position, self.period)
        number, rest = divmod(at, BLOCK)
        counts = run(self.shares, self._known(number), number * BLOCK, rest, keep=False)[2]
        return [int(count) for count in counts + periods * self.shares]

    def _known(self, number: int) -> Int64s:
        """Return the counts at the start of a block, computed from the last stored block before it."""
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


def run(shares: Int64s, counts: Int64s, start: int, count: int, *, keep: bool) -> Taken:
    """Continue the schedule for `count` positions from `start`, where each dataset has given `counts` samples.

    Return (dataset, sample) per position (empty unless `keep`), and the counts afterwards.
    """
    return native.compiled("blend", run_twin)(shares, counts, start, count, keep)


def run_twin(shares: Int64s, counts: Int64s, start: int, count: int, keep: bool) -> Taken:
    """Compute `run` with two heaps: datasets that may not come yet, and eligible datasets by deadline."""
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


class BlendedDataset:
    """Several datasets as one; sample ids number the first dataset's samples, then the second's, and so on."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self.datasets = list(datasets)
        self.offsets = np.cumsum([0, *(dataset.num_samples for dataset in datasets)], dtype=np.int64)

    @property
    def num_samples(self) -> int:
        return int(self.offsets[-1])

    def counts(self, sample_ids: Int64s) -> Counts:
        found = [dataset.counts(ids) for dataset, ids, _ in self._parts(sample_ids)]
        return Counts(sum(one.labels for one in found), sum(one.tokens for one in found))

    def tokens_each(self, sample_ids: Int64s) -> list[tuple[int, int]]:
        """Return, per dataset, (how many of these samples belong to it, how many tokens they hold)."""
        found = {id(dataset): (len(ids), dataset.counts(ids).tokens) for dataset, ids, _ in self._parts(sample_ids)}
        return [found.get(id(dataset), (0, 0)) for dataset in self.datasets]

    def batch(self, sample_ids: Int64s) -> Batch:
        parts = [(dataset.batch(ids), rows) for dataset, ids, rows in self._parts(sample_ids)]
        if len(parts) == 1:
            return parts[0][0]
        arrays = {}
        for field in fields(Batch):
            found = [(getattr(batch, field.name), rows) for batch, rows in parts]
            if found[0][0] is not None:
                whole = np.empty((len(sample_ids), *found[0][0].shape[1:]), found[0][0].dtype)
                for array, rows in found:
                    whole[rows] = array
                arrays[field.name] = whole
        return Batch(**arrays)

    def _parts(self, sample_ids: Int64s) -> Iterator[tuple[Dataset, Int64s, Int64s]]:
        """Yield (dataset, its own sample ids, their rows in the batch) per dataset that occurs in `sample_ids`."""
        for d, rows in by_dataset(np.searchsorted(self.offsets, sample_ids, side="right") - 1):
            yield self.datasets[d], sample_ids[rows] - self.offsets[d], rows


def by_dataset(which: NDArray[np.integer]) -> Iterator[tuple[int, Int64s]]:
    """Yield each distinct number with the ascending places where it occurs."""
    in_order = np.argsort(which, kind="stable")
    for rows in np.split(in_order, np.flatnonzero(np.diff(which[in_order])) + 1):
        if len(rows):
            yield int(which[rows[0]]), rows


class BlendOrder:
    """Mapping from a position to a BlendedDataset's sample id. `shuffled` false: each dataset in file order."""

    def __init__(self, shares: Sequence[int], sizes: Sequence[int], seed: int, shuffled: bool = True) -> None:
        self.schedule = Schedule(shares)
        self.offsets = np.cumsum([0, *sizes], dtype=np.int64)
        # because: with one seed for all, datasets of equal size would be read in the same order
        self._orders: list[SampleOrder] = [
            Order(size, mix(seed) + 1 + d) if shuffled else _Round(size) for d, size in enumerate(sizes)
        ]

    def ids(self, first: int, count: int) -> Int64s:
        which, samples = self.schedule.take(first, count)
        ids = np.empty(count, np.int64)
        for d, rows in by_dataset(which):  # a dataset's sample numbers are consecutive over its rows
            ids[rows] = self.offsets[d] + self._orders[d].ids(int(samples[rows[0]]), len(rows))
        return ids

    def counts_at(self, position: int) -> list[int]:
        """Return how many samples of each dataset come before this position."""
        return self.schedule.counts_at(position)


class _Round:
    """Sample order 0, 1, ..., n - 1, repeated."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def ids(self, first: int, count: int) -> Int64s:
        return np.arange(first, first + count) % self.num_samples


class MegatronBlendOrder:
    """Megatron-LM's blend order, computed position by position over the whole run."""

    def __init__(self, weights: Sequence[float], sizes: Sequence[int], num_samples: int) -> None:
        self.num_samples = num_samples
        self._which, self._samples = blend_index(weights, num_samples)
        self._offsets = np.cumsum([0, *sizes], dtype=np.int64)
        counts = np.bincount(self._which, minlength=len(sizes))
        short = np.flatnonzero(counts > np.array(sizes))
        if len(short):
            d = int(short[0])
            raise DataError(
                f"Megatron-LM's blend takes {counts[d]} samples of dataset {d + 1}, which was built with {sizes[d]}. "
                "Use data.order=own."
            )

    def ids(self, first: int, count: int) -> Int64s:
        if first + count > self.num_samples:
            raise DataError(
                f"Sample {first + count} was asked for and Megatron-LM's blend holds {self.num_samples}. "
                "Set data.megatron_samples to what the whole of its run takes."
            )
        part = slice(first, first + count)
        return self._offsets[self._which[part]] + self._samples[part]

    def counts_at(self, position: int) -> list[int]:
        counts: list[int] = np.bincount(self._which[:position], minlength=len(self._offsets) - 1).tolist()
        return counts
