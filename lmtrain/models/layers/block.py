"""A transformer block: attention and MLP, with norms before, after or between them. Called by Stack.

A block is the unit that `parallel` compiles, recomputes and shards. Its MLP stores neither its width nor its shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.kernels.activations import Activation, activate_with_bias
from lmtrain.kernels.triton_availability import uses_fused_kernels
from lmtrain.models.layers.attention import select_positions
from lmtrain.models.layers.rotary import Rotation

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activate(x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
    """Return f(x), where f is the activation of this name. If `gated`, the last dim of `x` is [gate | up], and the
    result is f(gate) * up, half as wide.
    """
    if not gated:
        return ACTIVATIONS[activation](x)
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


class UpLinear(nn.Linear):
    """A linear whose bias can be left out (`add_bias` false) and added by the fused activation after it."""

    def forward(self, x: Tensor, *, add_bias: bool = True) -> Tensor:
        return F.linear(x, self.weight, self.bias if add_bias else None)


class MLP(nn.Module):
    """The feed-forward network. up.weight is stored as [F] rows, or as [F gate | F up] rows if `gated`."""

    def __init__(
        self, width: int, ffn_width: int, activation: Activation, *, gated: bool = False, bias: bool, dropout: float
    ) -> None:
        super().__init__()
        self.activation, self.gated = activation, gated
        self.up = UpLinear(width, ffn_width * (2 if gated else 1), bias=bias)
        self.down = nn.Linear(ffn_width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden_BTF = (
            activate_with_bias(self.up(x_BTD, add_bias=False), self.up.bias, self.activation, gated=self.gated)
            if uses_fused_kernels(x_BTD.device)
            else activate(self.up(x_BTD), self.activation, gated=self.gated)
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
    """Attention, then the MLP, each added to the residual stream. A block has norms before its branches
    (`attention_norm`, `mlp_norm`), after them (`attention_out_norm`, `mlp_out_norm`), or both; one that it lacks is
    None. The residual stream is not normalized. `residual_scale` multiplies what a branch adds.
    """

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        *,
        attention_norm: nn.Module | None = None,
        mlp_norm: nn.Module | None = None,
        attention_out_norm: nn.Module | None = None,
        mlp_out_norm: nn.Module | None = None,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.attention_out_norm = attention_norm, attention, attention_out_norm
        self.mlp_norm, self.mlp, self.mlp_out_norm = mlp_norm, mlp, mlp_out_norm
        self.residual_scale = residual_scale

    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        normed_BTD = _apply(self.attention_norm, x_BTD)
        attention_BTD: Tensor = self.attention(normed_BTD, context.mask, context.rotation, context.query_positions_BQ)
        if context.query_positions_BQ is not None:
            x_BTD = select_positions(x_BTD, context.query_positions_BQ)
        x_BTD = x_BTD + self._scaled(_apply(self.attention_out_norm, attention_BTD))
        mlp_BTD: Tensor = self.mlp(_apply(self.mlp_norm, x_BTD))
        return x_BTD + self._scaled(_apply(self.mlp_out_norm, mlp_BTD))

    def _scaled(self, branch_BTD: Tensor) -> Tensor:
        return branch_BTD if self.residual_scale == 1.0 else branch_BTD * self.residual_scale


class ParallelBlock(Block):
    """A block whose attention and MLP read the same hidden states: on one norm, as in MegaScale, or each on its own."""

    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        normed_BTD = _apply(self.attention_norm, x_BTD)
        attention_BTD: Tensor = self.attention(normed_BTD, context.mask, context.rotation, context.query_positions_BQ)
        if context.query_positions_BQ is not None:
            x_BTD, normed_BTD = (select_positions(x, context.query_positions_BQ) for x in (x_BTD, normed_BTD))
        mlp_input_BTD = normed_BTD if self.mlp_norm is None else self.mlp_norm(x_BTD)
        x_BTD = x_BTD + self._scaled(attention_BTD)
        mlp_BTD: Tensor = self.mlp(mlp_input_BTD)
        return x_BTD + self._scaled(mlp_BTD)


class PostNormBlock(Block):
    """A post-norm block, as in the original transformer and BERT: a norm after each residual sum."""

    def forward(self, x_BTD: Tensor, context: BlockContext) -> Tensor:
        assert self.attention_norm is not None, "the sum with attention lacks its norm"
        assert self.mlp_norm is not None, "the sum with the MLP lacks its norm"
        attention_BTD: Tensor = self.attention(x_BTD, context.mask, context.rotation, context.query_positions_BQ)
        if context.query_positions_BQ is not None:
            x_BTD = select_positions(x_BTD, context.query_positions_BQ)
        x_BTD = self.attention_norm(x_BTD + self._scaled(attention_BTD))
        y_BTD: Tensor = self.mlp_norm(x_BTD + self._scaled(self.mlp(x_BTD)))
        return y_BTD


def _apply(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
