"""A blend of several datasets: consecutive sample numbers over all datasets, and an order that mixes them by share.

Called by assemble_training_data.py. The schedule decides which dataset a position takes; the dataset's own order, epoch
by epoch, decides which of its samples. Both are pure functions of the seed and the position. numpy only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import Batch, SourceCounts
from lmtrain.data.sample_dataset_interface import Counts, Dataset, Int64s, OrderedDataset, SampleOrder, mix
from lmtrain.runtime import compiled_helpers

MAX_SHARE_SUM = 1 << 40  # because: larger sums of shares would overflow 64 bits in the compiled twin
BLOCK = 1 << 18  # positions between two stored counts
ScheduleRun = tuple[NDArray[np.int32], Int64s, Int64s]


def integer_shares(weights: Sequence[float | int | Fraction]) -> list[int]:
    """Return one positive integer per weight, in the proportions of the weights. They are rounded only if their exact
    sum would exceed 2**40.
    """
    exact = [Fraction(repr(w)) if isinstance(w, float) else Fraction(w) for w in weights]  # 0.1 is 1/10
    unit = Fraction(math.lcm(*(share.denominator for share in exact)))
    unit /= math.gcd(*(int(share * unit) for share in exact))
    shares = [int(share * unit) for share in exact]
    total = sum(shares)
    if total <= MAX_SHARE_SUM:
        return shares
    floors = [max(share * MAX_SHARE_SUM // total, 1) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda d: (-(shares[d] * MAX_SHARE_SUM % total), d))
    for d in by_rest[: max(MAX_SHARE_SUM - sum(floors), 0)]:
        floors[d] += 1
    return floors


class Schedule:
    """Mapping from a position of the run to (dataset number, number of the sample within the dataset). The order of
    datasets repeats after sum(shares) positions.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        total = sum(shares)
        times = max(BLOCK // total, 1)  # several repeats of a short period are computed faster together
        self.shares = np.array(shares, np.int64) * times
        self.period = total * times
        self._counts = [np.zeros(len(shares), np.int64)]  # before positions 0, BLOCK, 2 BLOCK, ... of a period
        self._block: tuple[int, NDArray[np.int32], Int64s] = (-1, np.empty(0, np.int32), np.empty(0, np.int64))

    def assign(self, first: int, count: int) -> tuple[NDArray[np.int32], Int64s]:
        """Return two arrays for the `count` positions from `first` on: the number of the dataset that a position takes
        its sample from, and the running number of the sample in that dataset, which counts on from epoch to epoch.
        """
        datasets, samples = [], []
        while count > 0:
            periods, offset = divmod(first, self.period)
            block, skip = divmod(offset, BLOCK)
            block_datasets, block_samples = self._read_block(block)
            length = min(count, len(block_datasets) - skip)
            part_datasets = block_datasets[skip : skip + length]
            datasets.append(part_datasets)
            samples.append(block_samples[skip : skip + length] + periods * self.shares[part_datasets])
            first, count = first + length, count - length
        if not datasets:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        return np.concatenate(datasets), np.concatenate(samples)

    def samples_before(self, position: int) -> list[int]:
        """Return, per dataset, how many of its samples come before this position of the run."""
        periods, offset = divmod(position, self.period)
        block, rest = divmod(offset, BLOCK)
        counts = advance(self.shares, self._counts_before_block(block), block * BLOCK, rest, with_positions=False)[2]
        return [int(count) for count in counts + periods * self.shares]

    def _counts_before_block(self, block: int) -> Int64s:
        """Return, per dataset, how many of its samples come before block number `block` of the period (BLOCK positions
        each). Counts are stored for every block up to the last one requested.
        """
        while len(self._counts) <= block:
            start = (len(self._counts) - 1) * BLOCK
            self._counts.append(advance(self.shares, self._counts[-1], start, BLOCK, with_positions=False)[2])
        return self._counts[block]

    def _read_block(self, block: int) -> tuple[NDArray[np.int32], Int64s]:
        """Return two arrays for the positions in block number `block` of the period: dataset number, and number of the
        sample within the dataset. The last block read is cached.
        """
        if self._block[0] != block:
            start = block * BLOCK
            counts, length = self._counts_before_block(block), min(BLOCK, self.period - start)
            datasets, samples, counts = advance(self.shares, counts, start, length, with_positions=True)
            self._block = block, datasets, samples
            if block + 1 == len(self._counts):
                self._counts.append(counts)
        return self._block[1], self._block[2]


def advance(
    shares: Int64s, samples_before: Int64s, start: int, num_positions: int, *, with_positions: bool
) -> ScheduleRun:
    """Assign the `num_positions` positions from `start` on to datasets in the proportions of `shares`. `samples_before`
    is how many samples each dataset has given before.

    Return the dataset and the sample number per position (both empty unless `with_positions`), and how many samples
    each dataset has given afterwards.
    """
    advance = compiled_helpers.compiled("blend", advance_twin)
    return advance(shares, samples_before, start, num_positions, with_positions)


def advance_twin(
    shares: Int64s, samples_before: Int64s, start: int, num_positions: int, with_positions: bool
) -> ScheduleRun:
    """Compute `advance` in Python: assign positions from `start` on to datasets in the proportions of `shares`.
    `samples_before` are the samples of each dataset before `start`. Return (dataset per position, sample number per
    position, samples of each dataset after the last position); the first two are empty unless `with_positions`.

    Two heaps hold the datasets that are not due yet, and the due datasets by deadline.
    """
    parts, num_taken = [int(share) for share in shares], [int(c) for c in samples_before]
    total = sum(parts)
    waiting = [(num_taken[d] * total // parts[d], d) for d in range(len(parts))]
    ready: list[tuple[int, int]] = []
    heapq.heapify(waiting)
    datasets, samples = [], []
    for position in range(start, start + num_positions):
        while waiting and waiting[0][0] <= position:
            d = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (((num_taken[d] + 1) * total - 1) // parts[d], d))
        d = heapq.heappop(ready)[1]
        datasets.append(d)
        samples.append(num_taken[d])
        num_taken[d] += 1
        heapq.heappush(waiting, (num_taken[d] * total // parts[d], d))
    assignments = (datasets, samples) if with_positions else ([], [])
    return np.array(assignments[0], np.int32), np.array(assignments[1], np.int64), np.array(num_taken, np.int64)


class BlendedDataset:
    """Several datasets as one; sample ids number the first dataset's samples, then the second's, and so on."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self.datasets = list(datasets)
        self.offsets = np.cumsum([0, *(dataset.num_samples for dataset in datasets)], dtype=np.int64)

    @property
    def num_samples(self) -> int:
        return int(self.offsets[-1])

    def counts(self, sample_ids: Int64s) -> Counts:
        return total_counts(self.counts_by_dataset(sample_ids))

    def counts_by_dataset(self, sample_ids: Int64s) -> tuple[SourceCounts, ...]:
        """Return the counts of each dataset that has any of these samples, in the order of the datasets."""
        parts = self._split_by_dataset(sample_ids)
        return tuple(SourceCounts(d, rows, *self.datasets[d].counts(ids)) for d, ids, rows in parts)

    def batch(self, sample_ids: Int64s) -> Batch:
        parts = [(self.datasets[d].batch(ids), rows) for d, ids, rows in self._split_by_dataset(sample_ids)]
        if len(parts) == 1:
            return parts[0][0]
        arrays = {}
        for field in fields(Batch):
            part_arrays = [(getattr(batch, field.name), rows) for batch, rows in parts]
            if part_arrays[0][0] is not None:
                joined = np.empty((len(sample_ids), *part_arrays[0][0].shape[1:]), part_arrays[0][0].dtype)
                for array, rows in part_arrays:
                    joined[rows] = array
                arrays[field.name] = joined
        return Batch(**arrays)

    def _split_by_dataset(self, sample_ids: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
        """Yield (dataset number, sample ids within the dataset, their rows in the batch) per dataset that has any
        sample.
        """
        for d, rows in rows_by_dataset(np.searchsorted(self.offsets, sample_ids, side="right") - 1):
            yield d, sample_ids[rows] - self.offsets[d], rows


def counts_by_source(dataset: Dataset, sample_ids: Int64s) -> tuple[SourceCounts, ...]:
    """Return a SourceCounts (number of labels and tokens, rows of `sample_ids`) for each dataset of a blend that has
    any of these samples. Return () if `dataset` is not a blend of several datasets.
    """
    if isinstance(dataset, OrderedDataset):
        return counts_by_source(dataset.dataset, dataset.ids(sample_ids))
    if not isinstance(dataset, BlendedDataset) or len(dataset.datasets) == 1:
        return ()
    return dataset.counts_by_dataset(sample_ids)


def total_counts(parts: Sequence[SourceCounts]) -> Counts:
    return Counts(sum(part.labels for part in parts), sum(part.tokens for part in parts))


def rows_by_dataset(datasets: NDArray[np.integer]) -> Iterator[tuple[int, Int64s]]:
    """Yield (dataset number, indices) for each dataset number in the array `datasets`; the indices, ascending, are
    those of the entries with that number.
    """
    in_order = np.argsort(datasets, kind="stable")
    for rows in np.split(in_order, np.flatnonzero(np.diff(datasets[in_order])) + 1):
        if len(rows):
            yield int(datasets[rows[0]]), rows


def blend_seeds(seed: int, num_datasets: int) -> list[int]:
    """Return the seed of the order of each dataset in a blend, from the run's `seed`."""
    # because: with one seed for all, datasets of equal size would be read in the same order
    return [mix(seed) + 1 + d for d in range(num_datasets)]


class BlendOrder:
    """Mapping from a position to a BlendedDataset's sample id, for datasets with `sizes` samples that are read in the
    order `orders` each.
    """

    def __init__(self, shares: Sequence[int], sizes: Sequence[int], orders: Sequence[SampleOrder]) -> None:
        self.schedule, self.orders = Schedule(shares), orders
        self.offsets = np.cumsum([0, *sizes], dtype=np.int64)

    def ids(self, first: int, count: int) -> Int64s:
        datasets, samples = self.schedule.assign(first, count)
        ids = np.empty(count, np.int64)
        for d, rows in rows_by_dataset(datasets):  # a dataset's sample numbers are consecutive over its rows
            ids[rows] = self.offsets[d] + self.orders[d].ids(int(samples[rows[0]]), len(rows))
        return ids

    def samples_before(self, position: int) -> list[int]:
        """Return how many samples of each dataset come before this position."""
        return self.schedule.samples_before(position)


@dataclass(frozen=True)
class FileOrder:
    """Sample order 0, 1, ..., n - 1, repeated."""

    num_samples: int

    def ids(self, first: int, count: int) -> Int64s:
        return np.arange(first, first + count) % self.num_samples
