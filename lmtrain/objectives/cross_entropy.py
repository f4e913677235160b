"""Summed cross-entropy over the vocabulary, the loss of all language models. Called by objectives.

Written by hand because the logits are the largest tensor of a step: this function keeps the logits in their dtype
(bf16) and holds fp32 copies of a few rows at a time, while torch's own would hold two more whole fp32 copies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.batch import IGNORED
from lmtrain.kernels.cross_entropy import NO_COLUMN, logits_gradient, row_chunks, row_statistics, sum_dtype
from lmtrain.kernels.kernel_support import uses_fused_kernels


def cross_entropy_sum(logits: Tensor, labels: Tensor, num_samples: int = 0) -> Tensor:
    """Return the sum of -log p(label) in fp32 over labels that are not IGNORED. `logits` is [..., V] with `labels`
    [...]; columns of -inf, such as vocabulary padding, are allowed.

    With `num_samples`, return [1 + num_samples]: that sum, then the part of each sample, which gets no gradient.
    On a GPU backward overwrites the logits with their gradient.
    """
    kind = _OverLogits if uses_fused_kernels(logits.device) else _CrossEntropySum
    total: Tensor = kind.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, -2), labels.flatten(), num_samples
    )
    return total


def cross_entropy_plain(logits: Tensor, labels: Tensor, num_samples: int = 0) -> Tensor:
    """Return the same as `cross_entropy_sum`, written as a single expression for torch.compile, which fuses it without
    an fp32 copy of the logits.
    """
    logits_NV, labels_N = logits.flatten(0, -2).float(), labels.flatten()
    total = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")
    if not num_samples:
        return total
    # because: the compiler computes the softmax of both losses once
    losses_N = F.cross_entropy(logits_NV.detach(), labels_N, ignore_index=IGNORED, reduction="none")
    return with_sample_sums(total, losses_N, num_samples)


@torch.no_grad()
def count_hits(logits: Tensor, labels: Tensor, num_samples: int = 0) -> Tensor:
    """Return an fp32 scalar: the number of labels, IGNORED ones excluded, whose logit is the highest of its row. With
    `num_samples`, return [1 + num_samples]: that number, then the part of each sample.
    """
    logits_NV, labels_N = logits.flatten(0, -2), labels.flatten()
    label_N = logits_NV.gather(-1, labels_N.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    hits_N = (label_N == logits_NV.amax(-1)) & (labels_N != IGNORED)
    return with_sample_sums(hits_N.sum().to(torch.float32), hits_N, num_samples)


def with_sample_sums(total: Tensor, values_N: Tensor, num_samples: int) -> Tensor:
    """Return [1 + num_samples]: `total`, then the sum of `values_N` over the rows of each sample, which are equally
    many and follow each other. Return `total` alone if `num_samples` is 0.
    """
    if not num_samples:
        return total
    sums_B = values_N.view(num_samples, -1).sum(1, dtype=torch.float64).to(total.dtype)
    return torch.cat([total.view(1), sums_B])


class _CrossEntropySum(torch.autograd.Function):
    """The loss in torch operations, a chunk of rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, num_samples: int) -> Tensor:
        ctx.save_for_backward(logits_NV, labels_N)
        total = torch.zeros((), dtype=sum_dtype(logits_NV), device=logits_NV.device)
        losses_N = torch.empty(len(labels_N) if num_samples else 0, dtype=total.dtype, device=total.device)
        for rows in row_chunks(logits_NV):
            log_p = F.log_softmax(logits_NV[rows], dim=-1, dtype=total.dtype)
            total = total + F.nll_loss(log_p, labels_N[rows], ignore_index=IGNORED, reduction="sum")
            if num_samples:
                losses_N[rows] = F.nll_loss(log_p, labels_N[rows], ignore_index=IGNORED, reduction="none")
        return with_sample_sums(total, losses_N, num_samples)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the logits, (softmax - onehot(label)) * grad, and None for the labels. The gradient is
        0 in rows of IGNORED labels; `grad` is that of the total.
        """
        grad = grads[0].flatten()[0]
        logits_NV, labels_N = ctx.saved_tensors
        grad_NV, dtype = torch.empty_like(logits_NV), sum_dtype(logits_NV)
        for rows in row_chunks(logits_NV):
            label_N, grad_rows = labels_N[rows], grad_NV[rows]
            counts_N = label_N != IGNORED
            # because: with equal dtypes the softmax can be written straight into the gradient, without a copy
            in_place = grad_rows if grad_rows.dtype is dtype else None
            p_NV = torch.softmax(logits_NV[rows], -1, dtype=dtype, out=in_place)
            p_NV[torch.arange(len(label_N), device=label_N.device), label_N.clamp(min=0)] -= counts_N.to(dtype)
            p_NV.mul_((grad * counts_N).unsqueeze(-1))
            if in_place is None:
                grad_rows.copy_(p_NV)
        return grad_NV, None, None


class _OverLogits(torch.autograd.Function):
    """The loss in two fused kernels; the second overwrites the logits with their gradient."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, num_samples: int) -> Tensor:
        column_N = labels_N.masked_fill(labels_N == IGNORED, NO_COLUMN)
        top_N, sum_N, label_N = row_statistics(logits_NV, column_N).unbind()
        ctx.save_for_backward(logits_NV, column_N, top_N, sum_N)
        # because: 0 times NaN is NaN, so ignored rows are masked out rather than multiplied by 0
        losses_N = (sum_N.log() + (top_N - label_N)).masked_fill(column_N == NO_COLUMN, 0.0)
        return with_sample_sums(losses_N.sum(), losses_N, num_samples)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, column_N, top_N, sum_N = ctx.saved_tensors
        weight_N = grads[0].flatten()[0] * (column_N != NO_COLUMN)
        return logits_gradient(logits_NV, column_N, top_N, sum_N, weight_N), None, None
