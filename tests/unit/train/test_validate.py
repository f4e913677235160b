"""Validation samples are shared among the replicas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lmtrain.batch import IGNORED, Batch
from lmtrain.data.samples.causal_language_samples import CausalDataset
from lmtrain.train.in_loop.validate_and_evaluate import sum_over_batches, valid_batches


class Numbered:
    """Samples that are their own number."""

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        return Batch(ids[:, None], ids[:, None])


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
@pytest.mark.parametrize("num_samples", [1, 8, 9, 20])
def test_validation_is_shared_without_gap_or_repeat(dp: int, num_samples: int) -> None:
    ids: NDArray[np.int64] = np.arange(num_samples)
    valid: CausalDataset = Numbered()  # type: ignore[assignment]
    shares = [list(valid_batches(valid, ids, 4, rank, dp)) for rank in range(dp)]
    assert len({len(share) for share in shares}) == 1
    labels = [label for share in shares for batch in share for label in batch.labels_BT.flatten().tolist()]
    assert sorted(label for label in labels if label != IGNORED) == ids.tolist()
    assert all(batch.num_samples > 0 for share in shares for batch in share)


def test_losses_and_hits_of_many_batches_add_up_without_loss() -> None:
    """More hits than fp32 can count one by one, and losses whose sum it would round by a part in a hundred million."""
    draw = torch.Generator().manual_seed(5)
    sums = torch.stack([torch.rand(50_000, 2, generator=draw) * 9000, torch.full((50_000, 2), 4001.0)], dim=1)
    losses, hits = sum_over_batches(sums)
    assert losses == pytest.approx([math.fsum(sums[:, 0, term].tolist()) for term in range(2)], rel=1e-13)
    assert hits == [50_000 * 4001] * 2
