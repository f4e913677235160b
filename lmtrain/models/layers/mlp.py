"""The two linears between which a block thinks. Called by Block; knows neither its width nor its cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.kernels.activations import Activation, activated
from lmtrain.kernels.on_gpu import fuses


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": _swiglu,
}


class Up(nn.Linear):
    """A linear whose bias can be left to the activation behind it."""

    def forward(self, x: Tensor, *, biased: bool = True) -> Tensor:
        return F.linear(x, self.weight, self.bias if biased else None)


class MLP(nn.Module):
    """up.weight is stored as [F] rows, or [F gate | F up] rows for SwiGLU."""

    def __init__(self, width: int, ffn_width: int, activation: Activation, *, bias: bool, dropout: float) -> None:
        super().__init__()
        self.activation = activation
        self.up = Up(width, ffn_width * (2 if activation == "swiglu" else 1), bias=bias)
        self.down = nn.Linear(ffn_width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if fuses(x_BTD.device):
            hidden_BTF = activated(self.up(x_BTD, biased=False), self.up.bias, self.activation)
        else:
            hidden_BTF = ACTIVATIONS[self.activation](self.up(x_BTD))
        y: Tensor = self.dropout(self.down(hidden_BTF))
        return y
