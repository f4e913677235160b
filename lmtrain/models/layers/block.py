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
from lmtrain.models.layers.attention import Rotation, select_positions

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


class UpLinear(nn.Linear):
    """A linear whose bias can be left out (`add_bias` false) and added by the fused activation after it."""

    def forward(self, x: Tensor, *, add_bias: bool = True) -> Tensor:
        return F.linear(x, self.weight, self.bias if add_bias else None)


class MLP(nn.Module):
    """The feed-forward network. up.weight is stored as [F] rows, or as [F gate | F up] rows for SwiGLU."""

    def __init__(self, width: int, ffn_width: int, activation: Activation, *, bias: bool, dropout: float) -> None:
        super().__init__()
        self.activation = activation
        self.up = UpLinear(width, ffn_width * (2 if activation == "swiglu" else 1), bias=bias)
        self.down = nn.Linear(ffn_width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden_BTF = (
            activate_with_bias(self.up(x_BTD, add_bias=False), self.up.bias, self.activation)
            if uses_fused_kernels(x_BTD.device)
            else ACTIVATIONS[self.activation](self.up(x_BTD))
        )
        y: Tensor = self.dropout(self.down(hidden_BTF))
        return y


@dataclass(frozen=True)
class BlockContext:
    """The inputs, besides hidden states, that the blocks of a forward pass share.

    because: FSDP's mixed precision casts every tensor argument that it finds; inside a dataclass the angles stay fp32
    """

    mask: Tensor | BlockMask | None = None
    rotation: Rotation | None = None
    query_positions_BQ: Tensor | None = None  # the positions that the block computes; None: all


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

    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        normed_BTD = self.attention_norm(x_BTD)
        attention_BTD: Tensor = self.attention(normed_BTD, context.mask, context.rotation, context.query_positions_BQ)
        if context.query_positions_BQ is not None:
            x_BTD, normed_BTD = (select_positions(x, context.query_positions_BQ) for x in (x_BTD, normed_BTD))
        x_BTD = x_BTD + attention_BTD
        mlp_BTD: Tensor = self.mlp(normed_BTD if self.mlp_norm is None else self.mlp_norm(x_BTD))
        return x_BTD + mlp_BTD


class PostNormBlock(Block):
    """A post-norm block, as in the original transformer and BERT: a norm after each residual sum."""

    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        assert self.mlp_norm is not None, "a post-norm block needs a norm after each of its two residual sums"
        attention_BTD: Tensor = self.attention(x_BTD, context.mask, context.rotation, context.query_positions_BQ)
        if context.query_positions_BQ is not None:
            x_BTD = select_positions(x_BTD, context.query_positions_BQ)
        x_BTD = self.attention_norm(x_BTD + attention_BTD)
        y_BTD: Tensor = self.mlp_norm(x_BTD + self.mlp(x_BTD))
        return y_BTD


def build_norm(kind: Literal["layernorm", "rmsnorm"], width: int, *, eps: float, bias: bool) -> nn.Module:
    """Build a norm; both kinds sum in fp32 for any input dtype. An RMSNorm has no bias, whatever `bias` is."""
    return nn.RMSNorm(width, eps=eps) if kind == "rmsnorm" else nn.LayerNorm(width, eps=eps, bias=bias)
