"""Compile block by block: one small graph that every layer shares, instead of one graph of the whole model."""

from __future__ import annotations

from typing import Any

import torch

from lmtrain.objectives.cross_entropy import cross_entropy_plain


def apply_compile(model: Any, objective: Any) -> None:
    """Each block alone, and the loss, whose softmax over the vocabulary is the other place where fusion pays."""
    for block in model.blocks.values():
        block.compile(dynamic=False)
    objective.cross_entropy = torch.compile(cross_entropy_plain, dynamic=False)
