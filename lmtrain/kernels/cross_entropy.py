"""The kernels of cross-entropy: three numbers per row of logits, and the gradient of every logit.

Called by models/objectives, and by parallel if ranks shard the vocabulary: the columns may be a part of the vocabulary.
On a GPU each function is a kernel that reads the logits once, and the gradient overwrites the logits, because they are
the largest tensor of a step and are not needed again. The fallbacks hold fp32 copies of a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lmtrain.kernels.triton_availability import can_run_kernel

# because: 64M fp32 numbers are 256 MiB, small beside the logits and still large enough to fill a GPU
CHUNK_ELEMENTS = 64 << 20
NO_COLUMN = -1  # column index of a label outside these columns


def row_statistics(logits_NV: Tensor, column_N: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return [3, N]: for each row of logits its maximum, the sum of exp(logit - maximum), and the logit in column
    `column_N`, the row's label. Where the column is NO_COLUMN, the third number is 0.

    `dtype` overrides the dtype of the sums and the result.

    because: the maximum and the sum are separate since the rounding error of log(sum(exp)) grows with the logits' size.
    The errors of single exponentials have either sign and nearly cancel in a sum.
    """
    if dtype is None and can_run_kernel(logits_NV):
        from lmtrain.kernels import triton_cross_entropy  # because: Triton is installed only with a CUDA torch

        return triton_cross_entropy.row_statistics(logits_NV, column_N)
    return row_statistics_in_torch(logits_NV, column_N, dtype)


def logits_gradient(logits_NV: Tensor, column_N: Tensor, top_N: Tensor, sum_N: Tensor, weight_N: Tensor) -> Tensor:
    """Return the gradient of the cross-entropy with respect to the logits, (exp(logit - top) / sum - onehot(column)) *
    weight; the GPU kernel overwrites the logits with it. `column_N` is the column of each row's label, or NO_COLUMN for
    none; `top_N` and `sum_N` are from `row_statistics`, over the whole vocabulary; `weight_N` is the gradient of each
    row's loss.
    """
    if can_run_kernel(logits_NV):
        from lmtrain.kernels import triton_cross_entropy  # because: Triton is installed only with a CUDA torch

        return triton_cross_entropy.overwrite_with_gradient(logits_NV, column_N, top_N, sum_N, weight_N)
    return logits_gradient_in_torch(logits_NV, column_N, top_N, sum_N, weight_N)


def row_statistics_in_torch(logits_NV: Tensor, column_N: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return [3, N], the numbers of `row_statistics` for each row of logits. Uses torch operations, on any device."""
    return torch.cat([_chunk_statistics(logits_NV[rows], column_N[rows], dtype) for rows in row_chunks(logits_NV)], 1)


def logits_gradient_in_torch(
    logits_NV: Tensor, column_N: Tensor, top_N: Tensor, sum_N: Tensor, weight_N: Tensor
) -> Tensor:
    """Return the gradient of the cross-entropy with respect to the logits, as `logits_gradient` does for these
    arguments, by torch operations on any device. The logits are left unchanged.
    """
    chunks = list(row_chunks(logits_NV))
    if len(chunks) == 1:
        return _chunk_gradient(logits_NV, column_N, top_N, sum_N, weight_N).to(logits_NV.dtype)
    grad_NV = torch.empty_like(logits_NV)
    for rows in chunks:
        grad_NV[rows] = _chunk_gradient(logits_NV[rows], column_N[rows], top_N[rows], sum_N[rows], weight_N[rows])
    return grad_NV


def _chunk_gradient(logits_NV: Tensor, column_N: Tensor, top_N: Tensor, sum_N: Tensor, weight_N: Tensor) -> Tensor:
    p_NV = (logits_NV - top_N.unsqueeze(-1)).exp_().div_(sum_N.unsqueeze(-1))
    has_column_N1 = (column_N != NO_COLUMN).unsqueeze(-1)
    p_NV.scatter_add_(-1, column_N.clamp(min=0).unsqueeze(-1), has_column_N1.to(p_NV.dtype).neg_())
    return p_NV.mul_(weight_N.unsqueeze(-1))


def _chunk_statistics(logits_NV: Tensor, column_N: Tensor, dtype: torch.dtype | None) -> Tensor:
    logits_NV = logits_NV.to(sum_dtype(logits_NV))
    dtype = dtype or logits_NV.dtype
    # because: if all columns are padding, -inf - -inf would be NaN
    top_N = logits_NV.amax(-1).clamp(min=torch.finfo(logits_NV.dtype).min)
    sum_N = (logits_NV - top_N.unsqueeze(-1)).exp_().sum(-1, dtype=dtype)
    label_N = logits_NV.gather(-1, column_N.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.stack((top_N.to(dtype), sum_N, label_N.masked_fill(column_N == NO_COLUMN, 0.0).to(dtype)))


def row_chunks(logits_NV: Tensor) -> Iterator[slice]:
    """Yield slices that divide the rows of the logits into consecutive chunks, each of at most CHUNK_ELEMENTS logits
    but at least one row. If there are no rows, yield one slice.

    Under a compiler the only slice is all rows, because the compiler fuses the fp32 copies away.
    """
    if torch.compiler.is_compiling():
        return iter([slice(None)])
    num_rows, num_columns = logits_NV.shape
    step = max(1, CHUNK_ELEMENTS // num_columns)
    return (slice(start, start + step) for start in range(0, max(1, num_rows), step))


def sum_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype in which losses of these logits are summed: fp32, or the logits' own if it is wider."""
    return torch.promote_types(logits.dtype, torch.float32)
