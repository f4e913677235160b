"""What training asks of data: numbered samples that become batches, and an order to read them in. Torch-free.

The kinds are in causal.py (concatenated documents), packing.py (whole documents), masked.py (sentences),
megatron_order.py and blend.py; the loader and validation know only what is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import Batch

Int64s = NDArray[np.int64]


class Dataset(Protocol):
    @property
    def num_samples(self) -> int: ...

    def num_labels(self, sample_ids: Int64s) -> int:
        """Tokens of these samples that take part in the loss; cheap enough to count a whole global batch."""

    def batch(self, sample_ids: Int64s) -> Batch:
        """These samples as numpy arrays."""


def count_labels(dataset: Dataset, sample_ids: Int64s, example: Batch) -> tuple[int, ...]:
    """For each term of the loss, how many labels these samples have: tokens, and one a sample where they are pairs."""
    num_tokens = dataset.num_labels(sample_ids)
    return (num_tokens,) if example.pair_labels_B is None else (num_tokens, len(sample_ids))


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

    def num_labels(self, sample_ids: Int64s) -> int:
        return self.dataset.num_labels(self._ids(sample_ids))

    def batch(self, sample_ids: Int64s) -> Batch:
        return self.dataset.batch(self._ids(sample_ids))

    def _ids(self, positions: Int64s) -> Int64s:
        if len(positions) == 0:
            return positions
        first = int(positions.min())
        return self.order.ids(first, int(positions.max()) - first + 1)[positions - first]
