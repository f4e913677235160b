"""A copy of the model may have no row to score in a batch, and answers all the same."""

from __future__ import annotations

import torch

from lmtrain.kernels.cross_entropy import logits_gradient, row_statistics


def test_no_rows_have_no_sums_and_no_gradient() -> None:
    logits_NV, column_N = torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)
    top_N, sum_N, label_N = row_statistics(logits_NV, column_N)
    assert top_N.shape == sum_N.shape == label_N.shape == (0,)
    assert logits_gradient(logits_NV, column_N, top_N, sum_N, torch.ones(0)).shape == (0, 5)
