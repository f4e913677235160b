"""First weights, each drawn by its name alone: device, order of construction and layout never matter.

Called by parallel once a model has memory. Whoever holds a slice draws the whole with `draw` and slices it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lmtrain.spec import Tie


@dataclass(frozen=True)
class Start:
    """How a parameter starts: normal around `mean`, or constant where `std` is 0."""

    mean: float = 0.0
    std: float = 0.0
    num_rows: int | None = None  # rows after these pad the vocabulary and start at 0


class Startable(Protocol):
    def starts(self) -> dict[str, Start]: ...
    def ties(self) -> tuple[Tie, ...]: ...


def draw(name: str, shape: tuple[int, ...], start: Start, seed: int) -> Tensor:
    """The whole parameter in fp32 on the CPU. True rows do not change with the padding."""
    if start.std == 0.0:
        return torch.full(shape, start.mean, device="cpu")
    generator = torch.Generator().manual_seed(_seed_of(seed, name))
    num_rows = shape[0] if start.num_rows is None else start.num_rows
    value = torch.zeros(shape, device="cpu")
    value[:num_rows].normal_(start.mean, start.std, generator=generator)
    return value


@torch.no_grad()
def apply_init(model: nn.Module, seed: int) -> None:
    """Fill every parameter in place. Ties come first, since leaving meta makes two tensors of one."""
    apply_ties(model)
    starts = _startable(model).starts()
    # a pipeline stage that holds only the second of two tied weights draws what the other stage draws
    first = {tie.second: tie.first for tie in _startable(model).ties()}
    for name, parameter in model.named_parameters():
        parameter.copy_(draw(first.get(name, name), tuple(parameter.shape), starts[name], seed))


def apply_ties(model: nn.Module) -> None:
    """Make each tie's second name the same object as its first, where this model holds both."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for tie in _startable(model).ties():
        if {tie.first, tie.second} <= names:
            module, _, attribute = tie.second.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(tie.first))


def _startable(model: nn.Module) -> Startable:
    # because: nn.Module answers any attribute with Any or Tensor, so a type checker cannot see the protocol
    return model  # type: ignore[return-value]


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big")
