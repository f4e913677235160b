"""The gradient norm and clipping, over fp32 gradients. Called by ParallelModel.finish_gradients."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients as one vector, on the device: nothing waits for it here."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


@torch.no_grad()
def apply_clip(gradients: list[Tensor], norm: Tensor, clip_norm: float | None, loss_scale: float) -> None:
    """Take the loss scale out and clip to `clip_norm` in one multiplication. `norm` is that of the scaled gradients."""
    if clip_norm is None and loss_scale == 1.0:
        return
    factor = torch.full_like(norm, 1.0 / loss_scale)
    if clip_norm is not None:
        # because: 1e-6 keeps a zero norm from dividing by zero; torch's own clipping uses the same
        factor = factor * (clip_norm / (norm / loss_scale + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor)
