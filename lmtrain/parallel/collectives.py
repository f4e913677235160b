"""The linears and reductions of a tensor-parallel layer, as autograd functions on plain local tensors.

Called by the other modules of parallel. Uses an Axis and no modules; the axis of every autograd function has at least
two ranks.

A sharded sequence is [B, T/tp, D] per rank. A linear keeps the sharded input for backward and gathers the whole input
again. Activations and their gradients are summed in their own dtype (bf16 under bf16), as in Megatron-LM: the sums have
few terms, and fp32 would double the traffic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lmtrain.observe.measure import phases
from lmtrain.parallel.mesh import Axis
from lmtrain.parallel.products import weight_gradient
from lmtrain.runtime.processes.faults import fault_point

# because: torch 2.13 renamed these functions and warns at the old names; torch 2.11 has only the old names
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: Axis,
    *,
    sequence_parallel: bool,
    gradient_total: Tensor | None = None,
) -> Tensor:
    """Return this rank's outputs of a linear that is split by outputs over the axis; `weight` and `bias` are its rows.

    x is whole, or this rank's sequence shard if `sequence_parallel`. `gradient_total` is the fp32 sum to which the
    weight's gradient is added; autograd then receives None.
    """
    y: Tensor = _ColumnLinear.apply(x, weight, bias, axis, sequence_parallel, gradient_total)  # type: ignore[no-untyped-call]
    return y


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: Axis,
    *,
    sequence_parallel: bool,
    gradient_total: Tensor | None = None,
) -> Tensor:
    """Return the output of a linear that is split by inputs over the axis, summed over ranks; the bias is added once.

    x and `weight` hold this rank's inputs. The output is whole, or this rank's sequence shard if `sequence_parallel`.
    `gradient_total` as in `column_linear`.
    """
    y: Tensor = _RowLinear.apply(x, weight, bias, axis, sequence_parallel, gradient_total)  # type: ignore[no-untyped-call]
    return y


def sum_parts(x: Tensor, axis: Axis, *, sequence_parallel: bool) -> Tensor:
    """Return the sum of the ranks' x, or its sequence shard. Each rank's x receives the gradient of the whole sum."""
    y: Tensor = _SumParts.apply(x, axis, sequence_parallel)  # type: ignore[no-untyped-call]
    return y


def broadcast_from_first(x: Tensor, axis: Axis) -> Tensor:
    """Return the first rank's x on every rank. Only the first rank passes gradients on, so that they count once."""
    y: Tensor = _BroadcastFromFirst.apply(x, axis)  # type: ignore[no-untyped-call]
    return y


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        sequence_parallel: bool,
        gradient_total: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.sequence_parallel, ctx.gradient_total = axis, sequence_parallel, gradient_total
        return F.linear(gather_sequence(x, axis) if sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients. The gather of x overlaps the first product, the sum of x's gradient the second."""
        (grad,) = grads
        x, weight = ctx.saved_tensors
        parts, gathering = _start_gather(x, ctx.axis) if ctx.sequence_parallel else (x, None)
        grad_x = grad @ weight
        summed, summing = _start_sum(grad_x, ctx.axis, ctx.sequence_parallel)
        _wait(gathering, ctx.axis, parts)
        rows = grad.flatten(0, -2)
        whole = (_merge_sequence(parts, ctx.axis) if ctx.sequence_parallel else x).flatten(0, -2)
        grad_weight = weight_gradient(weight, ctx.gradient_total, rows, whole)
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        _wait(summing, ctx.axis, grad_x)
        return summed, grad_weight, grad_bias, None, None, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        sequence_parallel: bool,
        gradient_total: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.sequence_parallel, ctx.gradient_total = axis, sequence_parallel, gradient_total
        product = F.linear(x, weight)
        # because: recompute may keep this product, so the in-place sum works on a copy
        y, summing = _start_sum(product if sequence_parallel else product.clone(), axis, sequence_parallel)
        _wait(summing, axis, product)
        return _as_output(y, bias)  # the bias is added once, after the sum over ranks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients. A bias added to a sequence shard receives the gradient of this shard only."""
        (grad,) = grads
        x, weight = ctx.saved_tensors
        parts, gathering = _start_gather(grad, ctx.axis) if ctx.sequence_parallel else (grad, None)
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        _wait(gathering, ctx.axis, parts)
        whole = _merge_sequence(parts, ctx.axis) if ctx.sequence_parallel else grad
        grad_weight = weight_gradient(weight, ctx.gradient_total, whole.flatten(0, -2), x.flatten(0, -2))
        return whole @ weight, grad_weight, grad_bias, None, None, None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
        ctx.axis, ctx.sequence_parallel = axis, sequence_parallel
        y, summing = _start_sum(x if sequence_parallel else x.clone(), axis, sequence_parallel)
        _wait(summing, axis, x)
        return _as_output(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return gather_sequence(grad, ctx.axis) if ctx.sequence_parallel else grad, None, None


class _BroadcastFromFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.is_first = axis.index == 0
        # collective: sums the first rank's values with the other ranks' zeros, over tp
        return _as_output(all_reduce(x.clone() if ctx.is_first else torch.zeros_like(x), axis))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] if ctx.is_first else torch.zeros_like(grads[0]), None


def _as_output(y: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a tensor that was changed in place, plus an optional bias, as a valid output of a forward.

    because: torch 2.11's compiler treats such an output as a constant, and all gradients before it become 0
    """
    if torch.compiler.is_compiling():
        return y.clone() if bias is None else y + bias
    return y if bias is None else y.add_(bias)


def all_reduce(
    x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, what: str = "a sum"
) -> Tensor:
    """Reduce x in place over the axis and return it, without gradients. `what` names the wait in traces."""
    if axis.size == 1:
        return x
    if torch.compiler.is_compiling():  # because: a compiled graph can contain neither fault injection nor phase marks
        # collective: as below
        dist.all_reduce(x, op, group=axis.group)
    elif not fault_point("collective"):
        with phases.within("collective", what, axis=axis, tensor=x):
            # collective: the caller's tensor, over the caller's axis
            dist.all_reduce(x, op, group=axis.group)
    return x


def broadcast(x: Tensor, axis: Axis, index: int, what: str) -> Tensor:
    """Overwrite x with the tensor of the axis's rank `index` and return it. `what` names the wait in traces."""
    if axis.size > 1:
        with phases.within("collective", what, axis=axis, tensor=x):
            # collective: broadcasts a rank's tensor to the axis, without a sum
            dist.broadcast(x, axis.ranks[index], group=axis.group)
    return x


def gather_stack(x: Tensor, axis: Axis, what: str = "a gathering") -> Tensor:
    """Gather [...] of each rank into [ranks, ...], without gradients. `what` names the wait in traces."""
    parts, gathering = _start_gather(x.unsqueeze(0), axis)
    _wait(gathering, axis, parts, what)
    return parts


def gather_sequence(x_BTD: Tensor, axis: Axis) -> Tensor:
    """Gather [B, T/tp, D] of each rank into [B, T, D], without gradients."""
    parts, gathering = _start_gather(x_BTD, axis)
    _wait(gathering, axis, parts, "a gathering of the sequence")
    return _merge_sequence(parts, axis)


def gather_columns(x: Tensor, axis: Axis) -> Tensor:
    """Gather [..., V/tp] of each rank into whole logits [..., V], without gradients, for inference only."""
    return gather_stack(x, axis).movedim(0, -2).flatten(-2)


def _merge_sequence(parts: Tensor, axis: Axis) -> Tensor:
    """Reorder gathered shards [tp B, T/tp, D] to [B, T, D]; a copy unless B is 1."""
    return parts.view(axis.size, -1, *parts.shape[1:]).transpose(0, 1).flatten(1, 2)


def _split_sequence(x_BTD: Tensor, axis: Axis) -> Tensor:
    """Reorder [B, T, D] to [tp B, T/tp, D], so that each rank's shard is contiguous."""
    B, T, D = x_BTD.shape
    return x_BTD.reshape(B, axis.size, T // axis.size, D).transpose(0, 1).flatten(0, 1).contiguous()


def _start_sum(x: Tensor, axis: Axis, sequence_parallel: bool) -> tuple[Tensor, dist.Work | None]:
    """Start the sum over ranks; return the result, valid after the wait, and the work, None under a compiler.

    The result is a reduced sequence shard if `sequence_parallel`, else x, summed in place if x is contiguous.
    """
    # because: a compiler can trace only the synchronous form of a collective, and schedules the overlap by itself
    eager = not torch.compiler.is_compiling()
    if sequence_parallel:
        split_x = _split_sequence(x, axis)
        y = split_x.new_empty(split_x.shape[0] // axis.size, *split_x.shape[1:])
        # collective: sums partial activations (forward) or partial input gradients (backward) over tp
        work = reduce_scatter(y, split_x, group=axis.group, async_op=eager)
    else:
        y = x.contiguous()
        # collective: the same sum over tp, whole on every rank
        work = dist.all_reduce(y, group=axis.group, async_op=eager)
    return y, work if eager else None


def _start_gather(x: Tensor, axis: Axis) -> tuple[Tensor, dist.Work | None]:
    """Start gathering x of all ranks along dim 0; return the result, valid after the wait, and the work as above."""
    eager = not torch.compiler.is_compiling()
    x = x.contiguous()
    parts = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    # collective: concatenates the tp ranks' shards, without a sum
    work = all_gather(parts, x, group=axis.group, async_op=eager)
    return parts, work if eager else None


def _wait(work: dist.Work | None, axis: Axis, tensor: Tensor, wait_name: str = "a sum of activations") -> None:
    """Wait for a collective. `tensor` has the size that is summed or gathered, for the statistics of `wait_name`."""
    if work is not None:
        with phases.within("collective", wait_name, axis=axis, tensor=tensor, early=True):
            work.wait()
