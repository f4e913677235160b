"""First weights, each drawn by its name alone: device, order of construction and layout never matter.

Called by parallel once a model has memory. Whoever holds a slice draws the whole with `draw` and slices it.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from lmtrain.spec import LanguageModel, Start


def draw(name: str, shape: tuple[int, ...], start: Start, seed: int) -> Tensor:
    """The whole parameter in fp32 on the CPU. True rows do not change with the padding."""
    if start.std == 0.0:
        return torch.full(shape, start.mean, device="cpu")
    generator = torch.Generator().manual_seed(_seed_of(seed, name))
    num_rows = shape[0] if start.num_rows is None else start.num_rows
    value = torch.zeros(shape, device="cpu")
    value[:num_rows].normal_(start.mean, start.std, generator=generator)
    return value


def apply_ties(model: LanguageModel) -> None:
    """Make each tie's second name the same object as its first, where this model holds both."""
    assert isinstance(model, nn.Module)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for tie in model.ties():
        if {tie.first, tie.second} <= names:
            module, _, attribute = tie.second.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(tie.first))


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big")
