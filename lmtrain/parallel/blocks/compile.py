"""Compile block by block: one small graph that every layer shares, instead of one graph of the whole model."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from lmtrain.objectives.causal_lm import CausalLM
from lmtrain.objectives.cross_entropy import cross_entropy_plain, cross_entropy_sum
from lmtrain.parallel.blocks.recompute import Recomputed
from lmtrain.spec import LanguageModel


def apply_compile(model: LanguageModel, *, deterministic: bool) -> str:
    """Each block alone; returns what was done, for the log.

    `forward` is compiled and not the whole call: the hooks by which FSDP gathers weights stay outside the graph.
    """
    for block in model.blocks.values():
        forward = block.forward
        if isinstance(forward, Recomputed) and not forward.inside:
            forward.inner = _compiled(forward.inner, deterministic)
        else:
            block.forward = _compiled(forward, deterministic)
    return f"compile: {len(model.blocks)} blocks, each alone"


def compile_loss(objective: CausalLM, *, deterministic: bool) -> str:
    """Once for all stages: the softmax over the vocabulary is the other place where fusion pays."""
    alone = objective.cross_entropy is cross_entropy_sum  # else one over tp, which serves a compiler as it is
    function = cross_entropy_plain if alone else objective.cross_entropy
    # because: left to itself torch compiles twice, the second time for any number of rows
    dynamic = None if objective.rows_vary else False
    objective.cross_entropy = _compiled(function, deterministic, dynamic=dynamic)
    return "compile: the loss"


def _compiled(function: Any, deterministic: bool, *, dynamic: bool | None = False) -> Any:
    # because: compute.tf32 says whether it is used, and where warnings are errors this one would end the run
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    # because: else what runs fastest in a trial is taken, which is not the same kernel each time
    return torch.compile(function, dynamic=dynamic, options={"deterministic": True} if deterministic else None)
