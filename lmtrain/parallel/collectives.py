"""The products and sums that a tensor-parallel layer is made of, as autograd functions on plain local tensors.

Called by tensor and vocabulary. Knows an Axis and no module; every axis given here has more than one rank.

A sequence that is cut lies as [B, T/tp, D], rank by rank. What is kept for backward of a product is the cut input;
the whole one is gathered again. Sums of activations and of their gradients run in the dtype they have (bf16 under
bf16), as in Megatron-LM: they are few terms, and fp32 would double what is sent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lmtrain.observe.measure import phases
from lmtrain.parallel.mesh import Axis
from lmtrain.parallel.products import weight_product
from lmtrain.runtime.processes.faults import fault_point

# because: torch 2.13 renamed them and warns at the old names, 2.11 has the old ones alone
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, *, sequence: bool, total: Tensor | None = None
) -> Tensor:
    """Return this rank's outputs of a column-parallel linear; x is whole, or a part of the sequence.

    `total`: what the weight's gradient is added to, where autograd is not given it.
    """
    y: Tensor = _ColumnLinear.apply(x, weight, bias, axis, sequence, total)  # type: ignore[no-untyped-call]
    return y


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, *, sequence: bool, total: Tensor | None = None
) -> Tensor:
    """Return the outputs of a row-parallel linear, summed over ranks: whole, or this rank's part of the sequence."""
    y: Tensor = _RowLinear.apply(x, weight, bias, axis, sequence, total)  # type: ignore[no-untyped-call]
    return y


def sum_parts(x: Tensor, axis: Axis, *, sequence: bool) -> Tensor:
    """Return the sum over ranks, whole or this rank's part; each rank's x gets the gradient of the sum."""
    y: Tensor = _SumParts.apply(x, axis, sequence)  # type: ignore[no-untyped-call]
    return y


def taken_from_first(x: Tensor, axis: Axis) -> Tensor:
    """Return the first rank's x on every rank; gradients flow on the first alone, so that x counts once."""
    y: Tensor = _TakenFromFirst.apply(x, axis)  # type: ignore[no-untyped-call]
    return y


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sequence: bool, total: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.sequence, ctx.total = axis, sequence, total
        return F.linear(gather_sequence(x, axis) if sequence else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gathering x hides behind the first product, summing x's gradient behind the second."""
        (grad,) = grads
        x, weight = ctx.saved_tensors
        parts, gathering = _start_gather(x, ctx.axis) if ctx.sequence else (x, None)
        grad_x = grad @ weight
        summed, summing = _start_sum(grad_x, ctx.axis, ctx.sequence)
        _wait(gathering, ctx.axis, parts)
        rows = grad.flatten(0, -2)
        whole = (_join_sequence(parts, ctx.axis) if ctx.sequence else x).flatten(0, -2)
        grad_weight = weight_product(weight, ctx.total, rows, whole)
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        _wait(summing, ctx.axis, grad_x)
        return summed, grad_weight, grad_bias, None, None, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, sequence: bool, total: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.sequence, ctx.total = axis, sequence, total
        product = F.linear(x, weight)
        # because: recompute that keeps products must find this one as it was, so the sum in place is of a copy
        y, summing = _start_sum(product if sequence else product.clone(), axis, sequence)
        _wait(summing, axis, product)
        return _given(y, bias)  # once, after the sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients; a bias that was added to a part of the sequence gets that part's gradient alone."""
        (grad,) = grads
        x, weight = ctx.saved_tensors
        parts, gathering = _start_gather(grad, ctx.axis) if ctx.sequence else (grad, None)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        _wait(gathering, ctx.axis, parts)
        whole = _join_sequence(parts, ctx.axis) if ctx.sequence else grad
        grad_weight = weight_product(weight, ctx.total, whole.flatten(0, -2), x.flatten(0, -2))
        return whole @ weight, grad_weight, grad_bias, None, None, None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sequence: bool) -> Tensor:
        ctx.axis, ctx.sequence = axis, sequence
        y, summing = _start_sum(x if sequence else x.clone(), axis, sequence)
        _wait(summing, axis, x)
        return _given(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return gather_sequence(grad, ctx.axis) if ctx.sequence else grad, None, None


class _TakenFromFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.is_first = axis.index == 0
        # collective: one rank's numbers and zeros of the others, over tp
        return _given(all_reduce(x.clone() if ctx.is_first else torch.zeros_like(x), axis))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] if ctx.is_first else torch.zeros_like(grads[0]), None


def _given(y: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a forward's output from a sum that was made in place, plus a bias.

    because: torch 2.11's compiler takes such an output for a constant, and everything before it has gradients of 0.
    """
    if torch.compiler.is_compiling():
        return y.clone() if bias is None else y + bias
    return y if bias is None else y.add_(bias)


def all_reduce(
    x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, what: str = "a sum"
) -> Tensor:
    """All-reduce in place, without gradients; do nothing on an axis of one."""
    if axis.size == 1:
        return x
    if torch.compiler.is_compiling():  # because: neither a fault nor a mark is anything that a graph could hold
        # collective: the same as below
        dist.all_reduce(x, op, group=axis.group)
    elif not fault_point("collective"):
        with phases.within("collective", what, axis=axis, tensor=x):
            # collective: whatever the caller sums, over the axis it names
            dist.all_reduce(x, op, group=axis.group)
    return x


def broadcast(x: Tensor, axis: Axis, index: int, what: str) -> Tensor:
    """Broadcast in place from the axis's rank of this index."""
    if axis.size > 1:
        with phases.within("collective", what, axis=axis, tensor=x):
            # collective: nothing is summed; one rank's tensor, to all of the axis
            dist.broadcast(x, axis.ranks[index], group=axis.group)
    return x


def gather_stack(x: Tensor, axis: Axis, what: str = "a gathering") -> Tensor:
    """[...] of each rank -> [ranks, ...], without gradients."""
    parts, gathering = _start_gather(x.unsqueeze(0), axis)
    _wait(gathering, axis, parts, what)
    return parts


def gather_sequence(x_BTD: Tensor, axis: Axis) -> Tensor:
    """[B, T/tp, D] of each rank -> [B, T, D], without gradients."""
    parts, gathering = _start_gather(x_BTD, axis)
    _wait(gathering, axis, parts, "a gathering of the sequence")
    return _join_sequence(parts, axis)


def gather_columns(x: Tensor, axis: Axis) -> Tensor:
    """[..., V/tp] of each rank -> [..., V], without gradients: whole logits, for inference alone."""
    return gather_stack(x, axis).movedim(0, -2).flatten(-2)


def _join_sequence(parts: Tensor, axis: Axis) -> Tensor:
    """[tp B, T/tp, D] as ranks sent them -> [B, T, D]: a copy, unless B is 1."""
    return parts.view(axis.size, -1, *parts.shape[1:]).transpose(0, 1).flatten(1, 2)


def _cut_sequence(x_BTD: Tensor, axis: Axis) -> Tensor:
    """[B, T, D] -> [tp B, T/tp, D]: what each rank is to get lies together."""
    B, T, D = x_BTD.shape
    return x_BTD.reshape(B, axis.size, T // axis.size, D).transpose(0, 1).flatten(0, 1).contiguous()


def _start_sum(x: Tensor, axis: Axis, sequence: bool) -> tuple[Tensor, dist.Work | None]:
    """Start a sum over ranks; return its output, whole and in place or this rank's part, and the work to wait for."""
    # because: a compiler traces the plain form of a collective, not its handle, and finds the overlap by itself
    eager = not torch.compiler.is_compiling()
    if sequence:
        cut = _cut_sequence(x, axis)
        y = cut.new_empty(cut.shape[0] // axis.size, *cut.shape[1:])
        # collective: partial activations (forward) or partial gradients of a whole input (backward), over tp
        work = reduce_scatter(y, cut, group=axis.group, async_op=eager)
    else:
        y = x.contiguous()
        # collective: the same, and every tp rank keeps all of it
        work = dist.all_reduce(y, group=axis.group, async_op=eager)
    return y, work if eager else None


def _start_gather(x: Tensor, axis: Axis) -> tuple[Tensor, dist.Work | None]:
    eager = not torch.compiler.is_compiling()
    x = x.contiguous()
    parts = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    # collective: nothing is summed; each tp rank's cut, one after the other
    work = all_gather(parts, x, group=axis.group, async_op=eager)
    return parts, work if eager else None


def _wait(work: dist.Work | None, axis: Axis, whole: Tensor, what: str = "a sum of activations") -> None:
    """`whole` is as large as what is summed or gathered."""
    if work is not None:
        with phases.within("collective", what, axis=axis, tensor=whole, early=True):
            work.wait()
