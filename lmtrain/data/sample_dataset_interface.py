"""Interface between training and data: numbered samples that become batches, and the order of samples. Torch-free.

The implementations are in samples/: concatenated documents, whole documents, pairs of sentences, Megatron-LM's samples,
and blends; the loader and validation use only the interface in this file.

`ShuffledOrder` maps a position of the run to a sample id: a pure function of the seed and the position, so that nothing
has to be stored. Positions continue through the epochs; each epoch is a permutation of its own, computed per id by a
keyed bijection. csrc/ implements the same function, `permute_twin` below is its numpy reference, and both give equal
results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import Batch
from lmtrain.errors import DataError
from lmtrain.runtime import compiled_helpers

Int64s = NDArray[np.int64]

_MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # because: constants of splitmix64, a mixer without weak bits
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = 6
_MIN_HALF_BITS = 3  # because: with fewer bits per half the permutation of a tiny set is far from random


def mix(value: int) -> int:
    """Scramble a 64-bit integer: return the splitmix64 finalizer of `value` (modulo 2**64). Seeds are derived with it.
    """
    value &= _MASK
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)


def permute(ids: Int64s, n: int, seed: int) -> Int64s:
    """Apply a pseudorandom permutation of 0..n-1, determined by the seed, to each id in 0..n-1."""
    return compiled_helpers.compiled("permute", permute_twin)(np.ascontiguousarray(ids, np.int64), n, seed & _MASK)


def permute_twin(ids: Int64s, n: int, seed: int) -> Int64s:
    """Permute ids pseudorandomly within 0..n-1, with the results of the compiled `permute`, in numpy. A Feistel network
    on the next power of four is applied to an id until the result is below n.

    Raise ValueError if an id is outside 0..n-1.
    """
    if ids.size and (ids.min() < 0 or ids.max() >= n):
        raise ValueError(f"sample numbers must lie from 0 to {n - 1}")
    half_bits = np.uint64(max(_MIN_HALF_BITS, ((n - 1).bit_length() + 1) // 2))
    keys = [np.uint64(mix((seed & _MASK) + (i + 1) * GOLDEN)) for i in range(_ROUNDS)]
    values = ids.astype(np.uint64)
    outside = np.arange(values.size)
    while outside.size:
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: np.uint64, keys: Sequence[np.uint64]) -> NDArray[np.uint64]:
    """Apply a Feistel network, one round per 64-bit key, to each value: a bijection on numbers of 2 * half_bits bits.
    """
    left, right = values >> half_bits, values & ((np.uint64(1) << half_bits) - np.uint64(1))
    for key in keys:
        mixed = right ^ key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX_1)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_2)
        left, right = right, left ^ (mixed >> (np.uint64(64) - half_bits))
    return (left << half_bits) | right


@dataclass(frozen=True)
class ShuffledOrder:
    """Mapping from a position of the run to a sample id: a new permutation of all ids in each epoch.

    Epoch e is positions e*n to (e+1)*n - 1, for n samples.
    """

    num_samples: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError("The data gives no sample. Give more data, a larger share of it or shorter sequences.")

    def ids(self, first: int, count: int) -> Int64s:
        parts: list[Int64s] = []
        while count > 0:
            epoch, start = divmod(first, self.num_samples)
            length = min(count, self.num_samples - start)
            seed = mix(mix(self.seed) + epoch * GOLDEN)
            parts.append(permute(np.arange(start, start + length, dtype=np.int64), self.num_samples, seed))
            first, count = first + length, count - length
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


class Counts(NamedTuple):
    """Totals over a set of samples."""

    labels: int  # positions that the token loss scores
    tokens: int  # positions that are not padding


class Dataset(Protocol):
    """Interface of a dataset of numbered samples, 0 to num_samples - 1."""

    @property
    def num_samples(self) -> int: ...

    def counts(self, sample_ids: Int64s) -> Counts:
        """Return the number of labels and of tokens in these samples, cheaply enough for every rank and step."""

    def batch(self, sample_ids: Int64s) -> Batch:
        """Return these samples as a batch of numpy arrays."""


def labels_per_term(num_labels: int, num_samples: int, example: Batch) -> tuple[int, ...]:
    """Return the number of labels per loss term: token labels, then one pair label per sample if samples are pairs.

    `example` is any batch of the dataset; its pair labels show whether samples are pairs.
    """
    return (num_labels,) if example.pair_labels_B is None else (num_labels, num_samples)


class SampleOrder(Protocol):
    """Interface of an order in which a run reads the samples."""

    def ids(self, first: int, count: int) -> Int64s:
        """Return the sample ids at positions first to first + count - 1 of the run: a pure function of the position."""


@dataclass(frozen=True)
class OffsetOrder:
    """Sample order that starts at position `offset` of another order, to go on after the samples read before."""

    order: SampleOrder
    offset: int

    def ids(self, first: int, count: int) -> Int64s:
        return self.order.ids(self.offset + first, count)


@dataclass(frozen=True)
class OrderedDataset:
    """Dataset view in a given order; sample k is the sample at position k. Validation reads the first samples."""

    dataset: Dataset
    order: SampleOrder
    num_samples: int

    def counts(self, sample_ids: Int64s) -> Counts:
        return self.dataset.counts(self.ids(sample_ids))

    def batch(self, sample_ids: Int64s) -> Batch:
        return self.dataset.batch(self.ids(sample_ids))

    def ids(self, positions: Int64s) -> Int64s:
        """Return the sample id of the underlying dataset at each of these positions of the order."""
        if len(positions) == 0:
            return positions
        first = int(positions.min())
        return self.order.ids(first, int(positions.max()) - first + 1)[positions - first]
