"""Adam's two running averages and the direction computed from them, for optimizers that transform the direction.

Called by LAMB, and by Muon for parameters that are not hidden matrices. Works on shards, with a multi-tensor kernel per
operation, or a single fused kernel on a GPU. The update count is on the host, so that no device synchronization is
needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lmtrain.kernels import adamw
from lmtrain.kernels.adamw_tensors_and_rates import AdamWTensors, Rates
from lmtrain.kernels.triton_availability import uses_fused_kernels
from lmtrain.optim.optimizer_state import apply_empty_state


class UncompiledOptimizer(torch.optim.Optimizer):
    # because: torch wraps these functions with functools.wraps, so inspect.unwrap returns the original function; in a
    # release of torch that does not wrap them, it returns the same function
    """A base class without torch's compile wrappers around optimizer methods."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class UncompiledAdamW(UncompiledOptimizer, torch.optim.AdamW):
    """torch's AdamW without torch's compile wrapper around `step`."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


UncompiledAdamW.__name__ = "AdamW"  # because: a profiler names the span of a step after the class


SLOTS = ("exp_avg", "exp_avg_sq")


def groups_with_gradients(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], list[str], list[Tensor]]]:
    """Yield (parameter group, names of its parameters that have a gradient, these parameters) for each group of the
    optimizer; skip a group in which none has a gradient. Missing state tensors are first created as zeros.
    """
    apply_empty_state(optimizer)
    for group in optimizer.param_groups:
        pairs = [(name, p) for name, p in zip(group["names"], group["params"], strict=True) if p.grad is not None]
        if pairs:
            yield group, [name for name, _ in pairs], [p for _, p in pairs]


def increment_update_count(optimizer: Optimizer, parameters: Sequence[Tensor]) -> int:
    """Add 1 to the update count of each of `parameters`, and return the new count of the first. All must have the same
    count.
    """
    counts = [optimizer.state[p]["step"] for p in parameters]
    torch._foreach_add_(counts, 1)
    return int(counts[0])


def adam_directions(
    optimizer: Optimizer, parameters: Sequence[Tensor], *, betas: tuple[float, ...], eps: float
) -> list[Tensor]:
    """Make an Adam update of the state of `parameters`, without changing the parameters: update the running averages m
    and v with the gradients and add 1 to the update counts. Return for each parameter m / (sqrt(v) + eps), with m and v
    bias-corrected. Every parameter must have a gradient.
    """
    first, second = betas
    count = increment_update_count(optimizer, parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    m, v = ([optimizer.state[p][slot] for p in parameters] for slot in SLOTS)
    if uses_fused_kernels(parameters[0].device):
        buffers = [torch.empty_like(p) for p in parameters]
        columns = (buffers, [g.contiguous() for g in gradients], m, v)
        adamw.write_directions(
            [AdamWTensors(*row, None) for row in zip(*columns, strict=True)], Rates(1.0, betas, eps, 0.0, count)
        )
        return buffers
    torch._foreach_lerp_(m, gradients, 1 - first)
    torch._foreach_mul_(v, second)
    torch._foreach_addcmul_(v, gradients, gradients, value=1 - second)
    # because: turning the root into the direction in place needs only a single extra weight-sized buffer, as in torch
    directions: list[Tensor] = list(torch._foreach_sqrt(v))
    torch._foreach_div_(directions, (1 - second**count) ** 0.5)
    torch._foreach_add_(directions, eps)
    torch._foreach_reciprocal_(directions)
    torch._foreach_mul_(directions, m)
    torch._foreach_div_(directions, 1 - first**count)
    return directions


