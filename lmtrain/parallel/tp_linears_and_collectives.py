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

from lmtrain.parallel.linear_forward_backward_products import weight_gradient
from lmtrain.parallel.mesh import Axis
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.fault_injection import fault_point

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
    """Return this rank's outputs of a linear whose outputs are split over the ranks of `axis`; `weight` and `bias` hold
    this rank's rows. x is whole, or this rank's shard of the sequence if `sequence_parallel`.

    `gradient_total` is the fp32 sum to which the weight's gradient is added; autograd then receives None.
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
    """Return the output of a linear whose inputs are split over the ranks of `axis`: the ranks' products are summed,
    then the bias is added. x and `weight` hold this rank's inputs. With `sequence_parallel` the output is this rank's
    shard of the sequence.

    `gradient_total` is the fp32 sum to which the weight's gradient is added; autograd then receives None.
    """
    y: Tensor = _RowLinear.apply(x, weight, bias, axis, sequence_parallel, gradient_total)  # type: ignore[no-untyped-call]
    return y


def sum_parts(x: Tensor, axis: Axis, *, sequence_parallel: bool) -> Tensor:
    """Return the sum of x over the ranks of `axis`, or this rank's sequence shard of the sum if `sequence_parallel`. In
    backward each rank's x receives the gradient of the whole sum.
    """
    y: Tensor = _SumParts.apply(x, axis, sequence_parallel)  # type: ignore[no-untyped-call]
    return y


def sum_of_parts_and_gradients(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of x over the ranks of `axis`, from which each rank goes on in its own way: in backward each
    rank's x receives the sum of the gradients of all ranks.
    """
    y: Tensor = _SumOfPartsAndGradients.apply(x, axis)  # type: ignore[no-untyped-call]
    return y


def broadcast_from_first(x: Tensor, axis: Axis) -> Tensor:
    """Return the x of the first rank of `axis` on each of its ranks. In backward only the first rank's x receives a
    gradient, so that it counts once.
    """
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
        """Return the gradients of x, weight and bias, and None for the three other arguments. Two collectives overlap
        products: x is gathered during the product for its gradient, and that gradient is summed during the weight's.
        """
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
        return _output_with_bias(y, bias)  # the bias is added once, after the sum over ranks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, and None for the three other arguments. With sequence parallelism
        the bias's gradient is that of this rank's sequence shard, and is summed over ranks after the last backward.
        """
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
        return _output_with_bias(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return gather_sequence(grad, ctx.axis) if ctx.sequence_parallel else grad, None, None


class _SumOfPartsAndGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        # collective: sums a few numbers of each token, such as squares, over tp
        return _output_with_bias(all_reduce(x.clone(), axis))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # collective: sums the gradients of these numbers over tp
        return _output_with_bias(all_reduce(grads[0].clone(), ctx.axis)), None


class _BroadcastFromFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.is_first = axis.index == 0
        # collective: sums the first rank's values with the other ranks' zeros, over tp
        return _output_with_bias(all_reduce(x.clone() if ctx.is_first else torch.zeros_like(x), axis))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] if ctx.is_first else torch.zeros_like(grads[0]), None


def _output_with_bias(y: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add the bias, if any, to `y` in place and return `y`; under torch.compile return a new tensor instead. `y` is the
    result of an in-place collective and becomes the output of an autograd function.

    because: torch 2.11's compiler treats an output changed in place as a constant, and all gradients before it become 0
    """
    if torch.compiler.is_compiling():
        return y.clone() if bias is None else y + bias
    return y if bias is None else y.add_(bias)


def all_reduce(
    x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, wait_name: str = "a sum"
) -> Tensor:
    """Reduce x in place over the ranks of the axis and return it; autograd does not record this. `wait_name` is how
    traces name the wait.
    """
    if axis.size == 1:
        return x
    if torch.compiler.is_compiling():  # because: a compiled graph can contain neither fault injection nor phase marks
        # collective: as below
        dist.all_reduce(x, op, group=axis.group)
    elif not fault_point("collective"):
        with current_phase.within("collective", wait_name, axis=axis, tensor=x):
            # collective: the caller's tensor, over the caller's axis
            dist.all_reduce(x, op, group=axis.group)
    return x


def broadcast(x: Tensor, axis: Axis, source_index: int, wait_name: str) -> Tensor:
    """Overwrite x with the x of the axis's rank number `source_index`, and return it. `wait_name` is how traces name
    the wait.
    """
    if axis.size > 1:
        with current_phase.within("collective", wait_name, axis=axis, tensor=x):
            # collective: broadcasts a rank's tensor to the axis, without a sum
            dist.broadcast(x, axis.ranks[source_index], group=axis.group)
    return x


def gather_stack(x: Tensor, axis: Axis, wait_name: str = "a gathering") -> Tensor:
    """Return the x of every rank of the axis, stacked along a new first dimension; autograd does not record this.
    `wait_name` is how traces name the wait.
    """
    parts, gathering = _start_gather(x.unsqueeze(0), axis)
    _wait(gathering, axis, parts, wait_name)
    return parts


def gather_sequence(x_BTD: Tensor, axis: Axis) -> Tensor:
    """Return the whole sequence [B, T, D], gathered from the shards [B, T/tp, D] of the axis's ranks; autograd does not
    record this.
    """
    parts, gathering = _start_gather(x_BTD, axis)
    _wait(gathering, axis, parts, "a gathering of the sequence")
    return _merge_sequence(parts, axis)


def gather_columns(x: Tensor, axis: Axis) -> Tensor:
    """Return whole logits [..., V], gathered from the columns [..., V/tp] of the axis's ranks. Without gradients, so
    only for inference.
    """
    return gather_stack(x, axis).movedim(0, -2).flatten(-2)


def _merge_sequence(parts: Tensor, axis: Axis) -> Tensor:
    """Return the sequence [B, T, D] from `parts` [tp B, T/tp, D], the shards of all ranks one after the other; a copy
    unless B is 1.
    """
    return parts.view(axis.size, -1, *parts.shape[1:]).transpose(0, 1).flatten(1, 2)


def _split_sequence(x_BTD: Tensor, axis: Axis) -> Tensor:
    """Reorder [B, T, D] to [tp B, T/tp, D], so that each rank's shard is contiguous."""
    B, T, D = x_BTD.shape
    return x_BTD.reshape(B, axis.size, T // axis.size, D).transpose(0, 1).flatten(0, 1).contiguous()


def _start_sum(x: Tensor, axis: Axis, sequence_parallel: bool) -> tuple[Tensor, dist.Work | None]:
    """Start to sum x over the ranks of the axis and return (sum, work); the sum is valid after `work.wait()`. With
    `sequence_parallel` the sum is this rank's sequence shard only; otherwise x is summed in place if it is contiguous.

    Under torch.compile the work is None and the sum is valid at once.
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
    """Start to gather x of all ranks of the axis along dim 0 and return (gathered tensor, work); the tensor is valid
    after `work.wait()`. Under torch.compile the work is None and the tensor is valid at once.
    """
    eager = not torch.compiler.is_compiling()
    x = x.contiguous()
    parts = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    # collective: concatenates the tp ranks' shards, without a sum
    work = all_gather(parts, x, group=axis.group, async_op=eager)
    return parts, work if eager else None


def _wait(work: dist.Work | None, axis: Axis, tensor: Tensor, wait_name: str = "a sum of activations") -> None:
    """Wait for the collective `work` over the axis; return at once if it is None. Traces record the wait under
    `wait_name`, with the size of `tensor`, which is summed or gathered.
    """
    if work is not None:
        with current_phase.within("collective", wait_name, axis=axis, tensor=tensor, early=True):
            work.wait()
