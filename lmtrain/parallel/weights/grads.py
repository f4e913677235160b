"""What stands between the last backward and the optimizer: partial sums, the gradient norm, clipping.

Over local fp32 gradients, whatever the layout. Called by ParallelModel.finish_gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lmtrain.parallel.collectives import all_reduce
from lmtrain.parallel.mesh import Axis
from lmtrain.parallel.weights.tied import is_copy
from lmtrain.placement.places import Place
from lmtrain.runtime.processes.faults import fault_point
from lmtrain.spec import Split


@torch.no_grad()
def sum_partial_gradients(gradients: Mapping[str, Tensor], places: Mapping[str, Place], tp: Axis) -> None:
    """In place: norms and biases that each rank used on its own cut of the sequence."""
    partial = [gradient for name, gradient in gradients.items() if places[name].cut.split is Split.NONE]
    if tp.size == 1 or not partial:
        return
    flat = torch.cat([gradient.flatten() for gradient in partial])
    # collective: gradients of weights that are not cut, over tp, once a step
    all_reduce(flat, tp, what="gradients of weights that are not cut")
    parts = torch.split(flat, [gradient.numel() for gradient in partial])
    torch._foreach_copy_(partial, [part.view_as(gradient) for part, gradient in zip(parts, partial, strict=True)])


@torch.no_grad()
def gradient_norm(
    gradients: Mapping[str, Tensor], places: Mapping[str, Place], world: Axis, device: torch.device | None = None
) -> Tensor:
    """The 2-norm of all gradients as one vector, each weight once, on the device: nothing waits for it here.

    One number that is not finite anywhere makes it so everywhere: all ranks skip an fp16 overflow, or none does.
    """
    fault_point("grad_reduce")
    if world.size == 1:
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients.values()))))
        return norm
    alike: dict[int, list[Tensor]] = {}
    for name, gradient in gradients.items():
        if not is_copy(name, places[name]):
            alike.setdefault(places[name].num_holders, []).append(gradient)
    squares = [torch.stack(torch._foreach_norm(group)).square().sum() / held for held, group in alike.items()]
    # a stage without a layer and without an end holds nothing
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    # collective: sums of squares over the world; what several ranks hold is divided among them
    return all_reduce(total, world, what="the gradient norm").sqrt()


@torch.no_grad()
def apply_clip(gradients: list[Tensor], norm: Tensor, clip_norm: float | None, loss_scale: float) -> None:
    """Take the loss scale out and clip to `clip_norm` in one multiplication. `norm` is that of the scaled gradients."""
    factor = clip_factor(norm, clip_norm, loss_scale)
    if factor is not None:
        torch._foreach_mul_(gradients, factor)


@torch.no_grad()
def clip_factor(norm: Tensor, clip_norm: float | None, loss_scale: float) -> Tensor | None:
    """By what all gradients are to be multiplied, on the device; None for nothing."""
    if clip_norm is None and loss_scale == 1.0:
        return None
    factor = torch.full_like(norm, 1.0 / loss_scale)
    if clip_norm is None:
        return factor
    # because: 1e-6 keeps a zero norm from dividing by zero; torch's own clipping uses the same
    return factor * (clip_norm / (norm / loss_scale + 1e-6)).clamp(max=1.0)
