"""Which normalisation, by its word. Called by the stack's builders; both keep their sums in fp32 whatever the input."""

from __future__ import annotations

from typing import Literal

from torch import nn


def build_norm(kind: Literal["layernorm", "rmsnorm"], width: int, *, eps: float, bias: bool) -> nn.Module:
    """An RMSNorm has no bias, whatever the linears have."""
    return nn.RMSNorm(width, eps=eps) if kind == "rmsnorm" else nn.LayerNorm(width, eps=eps, bias=bias)
