"""Norms of hidden states and of queries and keys. Both kinds sum in fp32 for any input dtype. Used by all blocks."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NormKind = Literal["layernorm", "rmsnorm"]
WeightForm = Literal["ones", "from_zero", "none"]


def build_norm(kind: NormKind, width: int, *, eps: float, bias: bool, weight: WeightForm = "ones") -> nn.Module:
    """Build a norm of the last dim. An RMSNorm has no bias, whatever `bias` is, and nor has a norm whose `weight` is
    "none". With `weight` "from_zero" it multiplies by 1 + weight, and the weight starts at 0.
    """
    if weight == "from_zero":
        return FromZeroNorm(kind, width, eps=eps, bias=bias)
    has_weight = weight == "ones"
    if kind == "rmsnorm":
        return nn.RMSNorm(width, eps=eps, elementwise_affine=has_weight)
    return nn.LayerNorm(width, eps=eps, elementwise_affine=has_weight, bias=bias)


class FromZeroNorm(nn.Module):
    """A norm whose weight starts at 0: its result is multiplied by 1 + weight.

    because: a weight of 1 + w and a weight w are pulled to other values by weight decay, and adding 1 loses digits
    """

    def __init__(self, kind: NormKind, width: int, *, eps: float, bias: bool) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias and kind == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "rmsnorm":
            y = F.rms_norm(x, x.shape[-1:], eps=self.eps)
        else:
            y = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        y = scaled(y, self.weight, "from_zero")
        return y if self.bias is None else y + self.bias


class HeadNorm(nn.Module):
    """An RMSNorm of each head of queries or keys [B, T, heads, K], with one weight [K] for all heads."""

    def __init__(self, width: int, *, eps: float, weight: WeightForm) -> None:
        """Create a norm with `width` weights: K here, heads x K in a WholeNorm."""
        super().__init__()
        self.eps, self.form = eps, weight
        start = torch.zeros(width) if weight == "from_zero" else torch.ones(width)
        self.weight = None if weight == "none" else nn.Parameter(start)

    def forward(self, x_BTHK: Tensor) -> Tensor:
        return scaled(F.rms_norm(x_BTHK, x_BTHK.shape[-1:], eps=self.eps), self.weight, self.form)


class WholeNorm(HeadNorm):
    """An RMSNorm over all heads of queries or keys [B, T, heads, K] together, with a weight for each of their numbers.

    A tensor-parallel rank has a part of the heads, and the mean of squares is that of all ranks.
    """

    def forward(self, x_BTHK: Tensor) -> Tensor:
        x_BTN = x_BTHK.flatten(2)
        return scaled(F.rms_norm(x_BTN, x_BTN.shape[-1:], eps=self.eps), self.weight, self.form).view_as(x_BTHK)


def scaled(x: Tensor, weight: Tensor | None, form: WeightForm) -> Tensor:
    """Return `x`, the normalized numbers, times the norm's weight, or times 1 + weight if `form` is "from_zero". Return
    `x` itself if `weight` is None.
    """
    if weight is None:
        return x
    return torch.addcmul(x, x, weight) if form == "from_zero" else x * weight
