"""One layer of the stack: attention and MLP with norms before them, or behind, and which norms. Called by Stack.

This is the unit that `parallel` compiles, recomputes and shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from lmtrain.models.layers.asked import at
from lmtrain.models.layers.attention import Rotation

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class Surroundings:
    """What every block of one forward shares.

    because: FSDP's mixed precision casts every tensor argument it can reach; in a dataclass the angles stay fp32.
    """

    mask: Tensor | BlockMask | None = None
    rotation: Rotation | None = None
    asked_BQ: Tensor | None = None  # the positions that this block is to work out; None: all


class Block(nn.Module):
    """Pre-norm: the residual stream is untouched. Without an `mlp_norm` the two halves stand side by side on one norm:
    MegaScale's parallel block."""

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
    """The first transformers' and BERT's order: a norm of each sum."""

    def forward(self, x_BTD: Tensor, around: Surroundings) -> Tensor:
        assert self.mlp_norm is not None, "halves that stand side by side have one sum, and these are two"
        attended_BTD: Tensor = self.attention(x_BTD, around.mask, around.rotation, around.asked_BQ)
        if around.asked_BQ is not None:
            x_BTD = at(x_BTD, around.asked_BQ)
        x_BTD = self.attention_norm(x_BTD + attended_BTD)
        y_BTD: Tensor = self.mlp_norm(x_BTD + self.mlp(x_BTD))
        return y_BTD


def build_norm(kind: Literal["layernorm", "rmsnorm"], width: int, *, eps: float, bias: bool) -> nn.Module:
    """Both keep their sums in fp32 whatever the input. An RMSNorm has no bias, whatever the linears have."""
    return nn.RMSNorm(width, eps=eps) if kind == "rmsnorm" else nn.LayerNorm(width, eps=eps, bias=bias)
