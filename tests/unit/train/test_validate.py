"""Validation samples are shared among the replicas."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from lmtrain.batch import IGNORED, Batch
from lmtrain.data.samples.causal_language_samples import CausalDataset
from lmtrain.train.in_loop.validate_and_evaluate import valid_batches


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
