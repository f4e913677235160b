"""Several datasets as one: samples numbered dataset after dataset, and an order that mixes them by their shares.

Called by training_data.py. Which dataset a position takes is blend_schedule.py's; which of its samples, the dataset's
own order, epoch by epoch. Both are pure functions of the seed and the position. numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import Batch
from lmtrain.data.dataset import Counts, Dataset, SampleOrder
from lmtrain.data.order import Order, mix
from lmtrain.data.samples.blend_schedule import Schedule
from lmtrain.data.samples.megatron import blend_index
from lmtrain.errors import DataError

Int64s = NDArray[np.int64]


class BlendedDataset:
    """Sample ids run through the first dataset, then through the second, and so on."""

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
        """Of each dataset, how many of these samples are its, and how many tokens they hold."""
        found = {id(dataset): (len(ids), dataset.counts(ids).tokens) for dataset, ids, _ in self._parts(sample_ids)}
        return [found.get(id(dataset), (0, 0)) for dataset in self.datasets]

    def batch(self, sample_ids: Int64s) -> Batch:
        parts = [(dataset.batch(ids), rows) for dataset, ids, rows in self._parts(sample_ids)]
        if len(parts) == 1:
            return parts[0][0]
        arrays = {}
        for field in fields(Batch):
            found = [(getattr(batch, field.name), rows) for batch, rows in parts]
            if found[0][0] is None:
                continue
            whole = np.empty((len(sample_ids), *found[0][0].shape[1:]), found[0][0].dtype)
            for array, rows in found:
                whole[rows] = array
            arrays[field.name] = whole
        return Batch(**arrays)

    def _parts(self, sample_ids: Int64s) -> Iterator[tuple[Dataset, Int64s, Int64s]]:
        """Each dataset that is asked, its own ids, and the rows they are for."""
        which = np.searchsorted(self.offsets, sample_ids, side="right") - 1
        for d, rows in by_dataset(which):
            yield self.datasets[d], sample_ids[rows] - self.offsets[d], rows


def by_dataset(which: NDArray[np.integer]) -> Iterator[tuple[int, Int64s]]:
    """Each number that occurs, and where."""
    in_order = np.argsort(which, kind="stable")
    for rows in np.split(in_order, np.flatnonzero(np.diff(which[in_order])) + 1):
        if len(rows):
            yield int(which[rows[0]]), rows


class BlendOrder:
    """Position in the run -> sample id of a BlendedDataset. `shuffled` false: each dataset from its front."""

    def __init__(self, shares: Sequence[int], sizes: Sequence[int], seed: int, shuffled: bool = True) -> None:
        self.schedule = Schedule(shares)
        self.offsets = np.cumsum([0, *sizes], dtype=np.int64)
        # because: datasets of equal size should not be read in equal order
        self._orders: list[SampleOrder] = [
            Order(size, mix(seed) + 1 + d) if shuffled else _Round(size) for d, size in enumerate(sizes)
        ]

    def ids(self, first: int, count: int) -> Int64s:
        which, samples = self.schedule.take(first, count)
        ids = np.empty(count, np.int64)
        for d, rows in by_dataset(which):  # a dataset's samples follow each other, whatever lies between them
            ids[rows] = self.offsets[d] + self._orders[d].ids(int(samples[rows[0]]), len(rows))
        return ids


    def counts_at(self, position: int) -> list[int]:
        """How many samples each dataset has given before this position."""
        return self.schedule.counts_at(position)


class _Round:
    """0, 1, ..., n - 1 and again."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def ids(self, first: int, count: int) -> Int64s:
        return np.arange(first, first + count) % self.num_samples


class MegatronBlendOrder:
    """Megatron-LM's own blend: decided position by position from the first to the last of its run."""

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
