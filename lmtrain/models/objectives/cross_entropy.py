"""Summed cross-entropy over the vocabulary, the loss of all language models. Called by the objectives and parallel.

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
from lmtrain.kernels.triton_availability import uses_fused_kernels


def cross_entropy_sum(logits: Tensor, labels: Tensor, num_samples: int = 0, z_loss: float = 0.0) -> Tensor:
    """Return the sum of -log p(label) in at least fp32 over all labels that are not IGNORED. `logits` is [..., V] and
    `labels` [...]; columns of -inf, such as those that pad the vocabulary, are allowed. With `z_loss` or `num_samples`
    the result is a vector: this sum, then the z-loss, then a sum for each sample.

    The z-loss is `z_loss` x the sum of log(sum(exp(logits)))^2 over the same rows. Backward expects equal gradients of
    the first two numbers, because a caller divides both by the same count, and none of the samples' sums. On a GPU
    backward overwrites the logits with their gradient.
    """
    kind = _OverLogits if uses_fused_kernels(logits.device) else _CrossEntropySum
    total: Tensor = kind.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, -2), labels.flatten(), num_samples, z_loss
    )
    return total


def cross_entropy_plain(logits: Tensor, labels: Tensor, num_samples: int = 0, z_loss: float = 0.0) -> Tensor:
    """Return the same as `cross_entropy_sum`, computed by operations of torch that torch.compile fuses, so that
    compiled code holds no fp32 copy of the logits.
    """
    logits_NV, labels_N = logits.flatten(0, -2).float(), labels.flatten()
    total = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")
    if z_loss:
        total = append_z_loss(total, logits_NV.logsumexp(-1), labels_N == IGNORED, z_loss)
    if not num_samples:
        return total
    # because: the compiler computes the softmax of both losses once
    losses_N = F.cross_entropy(logits_NV.detach(), labels_N, ignore_index=IGNORED, reduction="none")
    return with_sample_sums(total, losses_N, num_samples)


@torch.no_grad()
def count_hits(logits: Tensor, labels: Tensor, num_samples: int = 0) -> Tensor:
    """Return as an fp32 scalar the number of labels, IGNORED ones excluded, whose logit is the highest of its row. If
    `num_samples` is given, return [1 + num_samples]: that number, then the same for each sample alone. `logits` is
    [..., V] and `labels` [...].
    """
    logits_NV, labels_N = logits.flatten(0, -2), labels.flatten()
    label_N = logits_NV.gather(-1, labels_N.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    hits_N = (label_N == logits_NV.amax(-1)) & (labels_N != IGNORED)
    return with_sample_sums(hits_N.sum().to(torch.float32), hits_N, num_samples)


def append_z_loss(total: Tensor, log_sums_N: Tensor, ignored_N: Tensor, z_loss: float) -> Tensor:
    """Return [2]: `total`, then the z-loss, z_loss x the sum of the squares of `log_sums_N`, the logs of each row's sum
    of exponentials. Rows of `ignored_N` are left out.
    """
    return torch.stack([total, z_loss * log_sums_N.masked_fill(ignored_N, 0.0).square().sum()])


def softmax_factor(log_sums_N: Tensor, z_loss: float) -> Tensor:
    """Return [N], the factor of the softmax in each row of the gradient with a z-loss, softmax * factor -
    onehot(label). `log_sums_N` are the logs of each row's sum of exponentials.
    """
    return 1.0 + 2.0 * z_loss * log_sums_N


def with_z_loss(total: Tensor, top_N: Tensor, sum_N: Tensor, ignored_N: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Append the z-loss to `total`, the summed cross-entropy. Return ([2], the two losses; [N], the sums to give to
    `logits_gradient` as `sum_N`, so that it computes the gradient of both). `top_N` and `sum_N` are from
    `row_statistics`, over the whole vocabulary; rows that are True in `ignored_N` count nothing. If `z_loss` is 0,
    return `total` and `sum_N` themselves.
    """
    if not z_loss:
        return total, sum_N
    log_sums_N = sum_N.log() + top_N
    # because: a sum divided by a factor multiplies the softmax by it, and the kernels need no other argument
    return append_z_loss(total, log_sums_N, ignored_N, z_loss), sum_N / softmax_factor(log_sums_N, z_loss)


def with_sample_sums(total: Tensor, values_N: Tensor, num_samples: int) -> Tensor:
    """Return a vector: `total`, one or two numbers, then for each sample the sum of `values_N` over its rows. All
    samples have equally many rows, one sample's after the other's. If `num_samples` is 0, return `total` itself.
    """
    if not num_samples:
        return total
    sums_B = values_N.view(num_samples, -1).sum(1, dtype=torch.float64).to(total.dtype)
    return torch.cat([total.view(-1), sums_B])


class _CrossEntropySum(torch.autograd.Function):
    """The loss in torch operations, a chunk of rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, num_samples: int, z_loss: float) -> Tensor:
        total = torch.zeros((), dtype=sum_dtype(logits_NV), device=logits_NV.device)
        losses_N = torch.empty(len(labels_N) if num_samples else 0, dtype=total.dtype, device=total.device)
        log_sums_N = torch.empty(len(labels_N) if z_loss else 0, dtype=total.dtype, device=total.device)
        for rows in row_chunks(logits_NV):
            log_p = F.log_softmax(logits_NV[rows], dim=-1, dtype=total.dtype)
            total = total + F.nll_loss(log_p, labels_N[rows], ignore_index=IGNORED, reduction="sum")
            if num_samples:
                losses_N[rows] = F.nll_loss(log_p, labels_N[rows], ignore_index=IGNORED, reduction="none")
            if z_loss:
                label_N1 = labels_N[rows].clamp(min=0).unsqueeze(-1)
                # because: a logit minus its log of p is the log of its row's sum, found without another pass
                log_sums_N[rows] = (logits_NV[rows].gather(-1, label_N1) - log_p.gather(-1, label_N1)).squeeze(-1)
        factors = []
        if z_loss:
            total = append_z_loss(total, log_sums_N, labels_N == IGNORED, z_loss)
            factors.append(softmax_factor(log_sums_N, z_loss))
        ctx.save_for_backward(logits_NV, labels_N, *factors)
        return with_sample_sums(total, losses_N, num_samples)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the logits, (softmax * factor - onehot(label)) * grad, and None for the other
        arguments. It is 0 in rows whose label is IGNORED; grad is the gradient of the summed loss, and the factor is 1
        without a z-loss.
        """
        grad = grads[0].flatten()[0]
        logits_NV, labels_N, *factors = ctx.saved_tensors
        grad_NV, dtype = torch.empty_like(logits_NV), sum_dtype(logits_NV)
        for rows in row_chunks(logits_NV):
            label_N, grad_rows = labels_N[rows], grad_NV[rows]
            counts_N = label_N != IGNORED
            # because: with equal dtypes the softmax can be written straight into the gradient, without a copy
            in_place = grad_rows if grad_rows.dtype is dtype else None
            p_NV = torch.softmax(logits_NV[rows], -1, dtype=dtype, out=in_place)
            for factor_N in factors:
                p_NV.mul_(factor_N[rows].unsqueeze(-1))
            p_NV[torch.arange(len(label_N), device=label_N.device), label_N.clamp(min=0)] -= counts_N.to(dtype)
            p_NV.mul_((grad * counts_N).unsqueeze(-1))
            if in_place is None:
                grad_rows.copy_(p_NV)
        return grad_NV, None, None, None


class _OverLogits(torch.autograd.Function):
    """The loss in two fused kernels; the second overwrites the logits with their gradient."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, num_samples: int, z_loss: float) -> Tensor:
        column_N = labels_N.masked_fill(labels_N == IGNORED, NO_COLUMN)
        top_N, sum_N, label_N = row_statistics(logits_NV, column_N).unbind()
        # because: 0 times NaN is NaN, so ignored rows are masked out rather than multiplied by 0
        losses_N = (sum_N.log() + (top_N - label_N)).masked_fill(column_N == NO_COLUMN, 0.0)
        total, sum_N = with_z_loss(losses_N.sum(), top_N, sum_N, column_N == NO_COLUMN, z_loss)
        ctx.save_for_backward(logits_NV, column_N, top_N, sum_N)
        return with_sample_sums(total, losses_N, num_samples)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, column_N, top_N, sum_N = ctx.saved_tensors
        weight_N = grads[0].flatten()[0] * (column_N != NO_COLUMN)
        return logits_gradient(logits_NV, column_N, top_N, sum_N, weight_N), None, None, None
