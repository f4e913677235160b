"""Compile block by block: one small graph that every layer shares, instead of one graph of the whole model."""

from __future__ import annotations

import torch

from lmtrain.objectives.causal_lm import CausalLM
from lmtrain.objectives.cross_entropy import cross_entropy_plain, cross_entropy_sum
from lmtrain.parallel.recompute import Recomputed
from lmtrain.spec import LanguageModel


def apply_compile(model: LanguageModel) -> str:
    """Each block alone; returns what was done, for the log.

    `forward` is compiled and not the whole call: the hooks by which FSDP gathers weights stay outside the graph.
    """
    for block in model.blocks.values():
        forward = block.forward
        if isinstance(forward, Recomputed) and not forward.inside:
            forward.inner = torch.compile(forward.inner, dynamic=False)
        else:
            block.forward = torch.compile(forward, dynamic=False)
    return f"compile: {len(model.blocks)} blocks, each alone"


def compile_loss(objective: CausalLM) -> str:
    """Once for all stages: the softmax over the vocabulary is the other place where fusion pays."""
    alone = objective.cross_entropy is cross_entropy_sum  # else one over tp, which serves a compiler as it is
    objective.cross_entropy = torch.compile(
        cross_entropy_plain if alone else objective.cross_entropy, dynamic=False
    )
    return "compile: the loss"
