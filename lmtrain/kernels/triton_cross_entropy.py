"""The Triton kernels of cross_entropy.py: a row of logits per program, sums in fp32. Imported only on a GPU machine."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # because: a row of GPT-2's logits is 13 blocks, and a block in fp32 is 32 numbers per thread
NUM_WARPS = 4
_LEAST = tl.constexpr(torch.finfo(torch.float32).min)


def row_statistics(logits_NV: Tensor, column_N: Tensor) -> Tensor:
    """Return [3, N], computed by a Triton kernel: for each row of logits its maximum, the sum of exp(logit - maximum),
    and the logit in column `column_N` (0 where that is NO_COLUMN).
    """
    num_rows, num_columns = logits_NV.shape
    assert logits_NV.stride(1) == 1
    sums_3N = torch.empty(3, num_rows, dtype=torch.float32, device=logits_NV.device)
    if num_rows:
        _cross_entropy_sums[(num_rows,)](
            logits_NV, column_N, sums_3N, logits_NV.stride(0), num_columns, num_rows, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return sums_3N


def overwrite_with_gradient(
    logits_NV: Tensor, column_N: Tensor, top_N: Tensor, sum_N: Tensor, weight_N: Tensor
) -> Tensor:
    """Overwrite the logits with the gradient of the cross-entropy, (exp(logit - top) / sum - onehot(column)) * weight,
    by a Triton kernel, and return them. The arguments are those of cross_entropy.logits_gradient.
    """
    num_rows, num_columns = logits_NV.shape
    assert logits_NV.stride(1) == 1
    if num_rows:
        _cross_entropy_gradient[(num_rows, triton.cdiv(num_columns, BLOCK))](
            logits_NV, column_N, top_N, sum_N, weight_N, logits_NV.stride(0), num_columns,
            BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return logits_NV


@triton.jit
def _cross_entropy_sums(
    logits, column, sums, stride, num_columns, num_rows, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    top = _LEAST  # because: if all columns are padding, -inf - -inf would be NaN
    total = 0.0
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < num_columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    label = tl.load(column + row)
    tl.store(sums + row, top)
    tl.store(sums + num_rows + row, total)
    tl.store(sums + 2 * num_rows + row, tl.load(logits + label, mask=label >= 0, other=0.0).to(tl.float32))


@triton.jit
def _cross_entropy_gradient(
    logits, column, top, total, weight, stride, num_columns, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = logits + row * stride + at
    x = tl.load(here, mask=at < num_columns, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.load(top + row)) / tl.load(total + row)
    p = tl.where(at == tl.load(column + row), p - 1.0, p)
    tl.store(here, (p * tl.load(weight + row)).to(here.dtype.element_ty), mask=at < num_columns)
