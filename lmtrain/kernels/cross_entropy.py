"""The kernels of cross-entropy: three numbers per row of logits, and the gradient of every logit.

Called by objectives, and by parallel if ranks shard the vocabulary: the columns may be a part of the vocabulary. On a
GPU each function is a kernel that reads the logits once, and the gradient overwrites the logits, because they are the
largest tensor of a step and are not needed again. The fallbacks hold fp32 copies of a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lmtrain.kernels.on_gpu import runs_kernel

# because: 64M fp32 numbers are 256 MiB, small beside the logits and still large enough to fill a GPU
CHUNK_ELEMENTS = 64 << 20
NOWHERE = -1  # column index of a label outside these columns


def row_sums(logits_NV: Tensor, column_N: Tensor, sums: torch.dtype | None = None) -> Tensor:
    """Return [3, N]: a row's maximum logit, its sum of exp(logit - maximum), and its label's logit (0 at NOWHERE).

    because: the maximum and the sum are separate since the rounding error of log(sum(exp)) grows with the logits' size.
    `sums` overrides the dtype of the result; the errors of single exponentials have either sign and nearly cancel in a
    sum.
    """
    if sums is None and runs_kernel(logits_NV):
        from lmtrain.kernels import triton_cross_entropy  # because: Triton is installed only with a CUDA torch

        return triton_cross_entropy.row_sums(logits_NV, column_N)
    return row_sums_twin(logits_NV, column_N, sums)


def gradient(logits_NV: Tensor, column_N: Tensor, top_N: Tensor, sum_N: Tensor, weight_N: Tensor) -> Tensor:
    """Return (exp(logit - top) / sum - onehot(column)) * weight. The GPU kernel overwrites the logits with it."""
    if runs_kernel(logits_NV):
        from lmtrain.kernels import triton_cross_entropy  # because: Triton is installed only with a CUDA torch

        return triton_cross_entropy.write_gradient(logits_NV, column_N, top_N, sum_N, weight_N)
    return gradient_twin(logits_NV, column_N, top_N, sum_N, weight_N)


def row_sums_twin(logits_NV: Tensor, column_N: Tensor, sums: torch.dtype | None = None) -> Tensor:
    return torch.cat([_row_sums(logits_NV[rows], column_N[rows], sums) for rows in chunks(logits_NV)], 1)


def gradient_twin(logits_NV: Tensor, column_N: Tensor, top_N: Tensor, sum_N: Tensor, weight_N: Tensor) -> Tensor:
    parts = list(chunks(logits_NV))
    if len(parts) == 1:
        return _gradient(logits_NV, column_N, top_N, sum_N, weight_N).to(logits_NV.dtype)
    grad_NV = torch.empty_like(logits_NV)
    for rows in parts:
        grad_NV[rows] = _gradient(logits_NV[rows], column_N[rows], top_N[rows], sum_N[rows], weight_N[rows])
    return grad_NV


def _gradient(logits_NV: Tensor, column_N: Tensor, top_N: Tensor, sum_N: Tensor, weight_N: Tensor) -> Tensor:
    p_NV = (logits_NV - top_N.unsqueeze(-1)).exp_().div_(sum_N.unsqueeze(-1))
    here_N1 = (column_N != NOWHERE).unsqueeze(-1)
    p_NV.scatter_add_(-1, column_N.clamp(min=0).unsqueeze(-1), here_N1.to(p_NV.dtype).neg_())
    return p_NV.mul_(weight_N.unsqueeze(-1))


def _row_sums(logits_NV: Tensor, column_N: Tensor, sums: torch.dtype | None) -> Tensor:
    logits_NV = logits_NV.to(sum_dtype(logits_NV))
    sums = sums or logits_NV.dtype
    # because: if all columns are padding, -inf - -inf would be NaN
    top_N = logits_NV.amax(-1).clamp(min=torch.finfo(logits_NV.dtype).min)
    sum_N = (logits_NV - top_N.unsqueeze(-1)).exp_().sum(-1, dtype=sums)
    label_N = logits_NV.gather(-1, column_N.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.stack((top_N.to(sums), sum_N, label_N.masked_fill(column_N == NOWHERE, 0.0).to(sums)))


def chunks(logits_NV: Tensor) -> Iterator[slice]:
    """Yield slices of rows of at most CHUNK_ELEMENTS logits, at least one slice even without rows.

    Under a compiler the only slice is all rows, because the compiler fuses the fp32 copies away.
    """
    if torch.compiler.is_compiling():
        return iter([slice(None)])
    num_rows, num_columns = logits_NV.shape
    step = max(1, CHUNK_ELEMENTS // num_columns)
    return (slice(start, start + step) for start in range(0, max(1, num_rows), step))


def sum_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)
