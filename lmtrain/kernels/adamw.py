"""An AdamW step of many tensors in a single pass: clipping, both averages, the weight and its half-precision copy.

Called by optim. Separate passes move 42 bytes per weight; this pass moves 30. The fallback does the same arithmetic, a
tensor at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmtrain.kernels.moved import Moved, Rates
from lmtrain.kernels.on_gpu import runs_kernel


@torch.no_grad()
def step(moved: Sequence[Moved], rates: Rates, factor: Tensor | None) -> None:
    """Update weights, averages and half-precision copies in place.

    Gradients are scaled by `factor` but not overwritten.
    """
    if moved and runs_kernel(moved[0].weight):
        from lmtrain.kernels import triton_adamw  # because: Triton is installed only with a CUDA torch

        triton_adamw.step(moved, rates, factor)
    else:
        step_twin(moved, rates, factor)


@torch.no_grad()
def directions(moved: Sequence[Moved], rates: Rates) -> None:
    """Update the averages and overwrite each weight tensor with `step_size * first / (root of second + eps)`.

    The previous content of the weight tensor is ignored. The caller subtracts the direction.
    """
    if moved and runs_kernel(moved[0].weight):
        from lmtrain.kernels import triton_adamw  # because: Triton is installed only with a CUDA torch

        triton_adamw.step(moved, rates, None, directs=True)
    else:
        directions_twin(moved, rates)


@torch.no_grad()
def directions_twin(moved: Sequence[Moved], rates: Rates) -> None:
    for one in moved:
        root = _averaged(one, one.gradient, rates)
        one.weight.copy_(one.first).mul_(rates.step_size).div_(root)


@torch.no_grad()
def step_twin(moved: Sequence[Moved], rates: Rates, factor: Tensor | None) -> None:
    for one in moved:
        root = _averaged(one, one.gradient if factor is None else one.gradient * factor, rates)
        one.weight.mul_(rates.kept).addcdiv_(one.first, root, value=-rates.step_size)
        if one.rounded is not None:
            one.rounded.copy_(one.weight)


def _averaged(one: Moved, gradient: Tensor, rates: Rates) -> Tensor:
    """Update both averages in place and return the divisor of the first average."""
    first, second = rates.betas
    one.first.lerp_(gradient, 1.0 - first)
    one.second.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
    return one.second.sqrt().div_(rates.root).add_(rates.eps)
