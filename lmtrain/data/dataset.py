"""What training asks of data: numbered samples that become batches, and an order to read them in. Torch-free.

The kinds are in samples: causal.py (concatenated documents), packing.py (whole documents), masked.py (sentences),
megatron.py and blend.py; the loader and validation know only what is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import Batch

Int64s = NDArray[np.int64]


class Counts(NamedTuple):
    """What some samples hold, over all of them."""

    labels: int  # positions that take part in the loss of tokens
    tokens: int  # positions that are not padding


class Dataset(Protocol):
    @property
    def num_samples(self) -> int: ...

    def counts(self, sample_ids: Int64s) -> Counts:
        """Of these samples; cheap enough to count a whole global batch on every rank."""

    def batch(self, sample_ids: Int64s) -> Batch:
        """These samples as numpy arrays."""


def labels_of_terms(num_labels: int, num_samples: int, example: Batch) -> tuple[int, ...]:
    """For each term of the loss, how many labels there are: those of tokens, and one a sample where these are pairs."""
    return (num_labels,) if example.pair_labels_B is None else (num_labels, num_samples)


class SampleOrder(Protocol):
    def ids(self, first: int, count: int) -> Int64s:
        """The samples at these positions of the run: a pure function of the position."""


@dataclass(frozen=True)
class Later:
    """An order entered at its position `skipped`: how a run goes on where another tool's stopped."""

    order: SampleOrder
    skipped: int

    def ids(self, first: int, count: int) -> Int64s:
        return self.order.ids(self.skipped + first, count)


@dataclass(frozen=True)
class InOrder:
    """A dataset seen through an order: sample k is what stands at position k. Validation reads from the front."""

    dataset: Dataset
    order: SampleOrder
    num_samples: int

    def counts(self, sample_ids: Int64s) -> Counts:
        return self.dataset.counts(self._ids(sample_ids))

    def batch(self, sample_ids: Int64s) -> Batch:
        return self.dataset.batch(self._ids(sample_ids))

    def _ids(self, positions: Int64s) -> Int64s:
        if len(positions) == 0:
            return positions
        first = int(positions.min())
        return self.order.ids(first, int(positions.max()) - first + 1)[positions - first]
