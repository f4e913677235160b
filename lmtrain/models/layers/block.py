"""A transformer block: attention and MLP with pre-norm, post-norm or a parallel layout. Called by Stack.

A block is the unit that `parallel` compiles, recomputes and shards. Its MLP stores neither its width nor its shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.kernels.activations import Activation, activate_with_bias
from lmtrain.kernels.kernel_support import uses_fused_kernels
from lmtrain.models.layers.attention import Rotation, at

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": _swiglu,
}


class Up(nn.Linear):
    """A linear whose bias can be left to the fused activation after it."""

    def forward(self, x: Tensor, *, biased: bool = True) -> Tensor:
        return F.linear(x, self.weight, self.bias if biased else None)


class MLP(nn.Module):
    """The feed-forward network. up.weight is stored as [F] rows, or as [F gate | F up] rows for SwiGLU."""

    def __init__(self, width: int, ffn_width: int, activation: Activation, *, bias: bool, dropout: float) -> None:
        super().__init__()
        self.activation = activation
        self.up = Up(width, ffn_width * (2 if activation == "swiglu" else 1), bias=bias)
        self.down = nn.Linear(ffn_width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden_BTF = (
            activate_with_bias(self.up(x_BTD, biased=False), self.up.bias, self.activation)
            if uses_fused_kernels(x_BTD.device)
            else ACTIVATIONS[self.activation](self.up(x_BTD))
        )
        y: Tensor = self.dropout(self.down(hidden_BTF))
        return y


@dataclass(frozen=True)
class Surroundings:
    """The inputs that all blocks of a forward pass share.

    because: FSDP's mixed precision casts every tensor argument that it finds; inside a dataclass the angles stay fp32
    """

    mask: Tensor | BlockMask | None = None
    rotation: Rotation | None = None
    asked_BQ: Tensor | None = None  # the positions that this block computes; None: all


class Block(nn.Module):
    """A pre-norm block, which leaves the residual stream unnormalized.

    Without an `mlp_norm` attention and MLP run in parallel on the same norm: MegaScale's parallel block.
    """

    def __init__(
        self, attention_norm: nn.Module, attention: nn.Module, mlp_norm: nn.Module | None, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(self, x_BTD: Tensor, around: Surroundings) -> Tensor:
        normed_BTD = self.attention_norm(x_BTD)
        attended_BTD: Tensor = self.attention(normed_BTD, around.mask, around.rotation, around.asked_BQ)
        if around.asked_BQ is not None:
            x_BTD, normed_BTD = at(x_BTD, around.asked_BQ), at(normed_BTD, around.asked_BQ)
        x_BTD = x_BTD + attended_BTD
        thought_BTD: Tensor = self.mlp(normed_BTD if self.mlp_norm is None else self.mlp_norm(x_BTD))
        return x_BTD + thought_BTD


class PostNormBlock(Block):
    """A post-norm block, as in the original transformer and BERT: a norm after each residual sum."""

    def forward(self, x_BTD: Tensor, around: Surroundings) -> Tensor:
        assert self.mlp_norm is not None, "halves that stand side by side have one sum, and these are two"
        attended_BTD: Tensor = self.attention(x_BTD, around.mask, around.rotation, around.asked_BQ)
        if around.asked_BQ is not None:
            x_BTD = at(x_BTD, around.asked_BQ)
        x_BTD = self.attention_norm(x_BTD + attended_BTD)
        y_BTD: Tensor = self.mlp_norm(x_BTD + self.mlp(x_BTD))
        return y_BTD


def build_norm(kind: Literal["layernorm", "rmsnorm"], width: int, *, eps: float, bias: bool) -> nn.Module:
    """Build a norm; both kinds sum in fp32 for any input dtype. An RMSNorm has no bias, whatever `bias` is."""
    return nn.RMSNorm(width, eps=eps) if kind == "rmsnorm" else nn.LayerNorm(width, eps=eps, bias=bias)
