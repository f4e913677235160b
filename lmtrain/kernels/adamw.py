"""An AdamW step of many tensors in a single pass: clipping, both averages, the weight and its half-precision copy.

Called by optim. Separate passes move 42 bytes per weight; this pass moves 30. The fallback does the same arithmetic, a
tensor at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmtrain.kernels.adamw_tensors_and_rates import AdamWTensors, Rates
from lmtrain.kernels.triton_availability import can_run_kernel


@torch.no_grad()
def step(entries: Sequence[AdamWTensors], rates: Rates, gradient_factor: Tensor | None) -> None:
    """Run an AdamW step in place for each weight in `entries`: update the weight, its running averages and its
    half-precision copy, if there is one. `rates` has learning rate, betas, eps, weight decay and the number of this
    update. Gradients are multiplied by `gradient_factor`, a scalar on the device (None: 1), but not overwritten.
    """
    if entries and can_run_kernel(entries[0].weight):
        from lmtrain.kernels import triton_adamw  # because: Triton is installed only with a CUDA torch

        triton_adamw.step(entries, rates, gradient_factor)
    else:
        step_in_torch(entries, rates, gradient_factor)


@torch.no_grad()
def write_directions(entries: Sequence[AdamWTensors], rates: Rates) -> None:
    """Update the running averages of each weight in `entries`, and overwrite its `weight` tensor, whose values are not
    read, with Adam's direction times the learning rate. `rates` has learning rate, betas, eps and the number of this
    update.

    The direction is `step_size * first_average / (corrected root of second_average + eps)`; the caller subtracts it.
    """
    if entries and can_run_kernel(entries[0].weight):
        from lmtrain.kernels import triton_adamw  # because: Triton is installed only with a CUDA torch

        triton_adamw.step(entries, rates, None, as_directions=True)
    else:
        write_directions_in_torch(entries, rates)


@torch.no_grad()
def write_directions_in_torch(entries: Sequence[AdamWTensors], rates: Rates) -> None:
    """Update the running averages of each weight in `entries`, and overwrite its `weight` tensor with Adam's direction
    times the learning rate, as `write_directions` does, by torch operations on any device.
    """
    for entry in entries:
        divisor = _update_averages(entry, entry.gradient, rates)
        entry.weight.copy_(entry.first_average).mul_(rates.step_size).div_(divisor)


@torch.no_grad()
def step_in_torch(entries: Sequence[AdamWTensors], rates: Rates, gradient_factor: Tensor | None) -> None:
    """Run an AdamW step in place for each weight in `entries`, as `step` does, by torch operations on any device.
    Gradients are multiplied by `gradient_factor` (None: 1), but not overwritten.
    """
    for entry in entries:
        gradient = entry.gradient if gradient_factor is None else entry.gradient * gradient_factor
        divisor = _update_averages(entry, gradient, rates)
        entry.weight.mul_(rates.decay_factor).addcdiv_(entry.first_average, divisor, value=-rates.step_size)
        if entry.compute_copy is not None:
            entry.compute_copy.copy_(entry.weight)


def _update_averages(entry: AdamWTensors, gradient: Tensor, rates: Rates) -> Tensor:
    """Update a weight's running averages of gradients and of squared gradients in place. Return the number by which
    Adam divides the first average: the bias-corrected root of the second average, plus eps, for each element.
    """
    first, second = rates.betas
    entry.first_average.lerp_(gradient, 1.0 - first)
    entry.second_average.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
    return entry.second_average.sqrt().div_(rates.root_correction).add_(rates.eps)
