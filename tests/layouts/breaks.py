"""What a worker does for test_breaks.py: train a step whose blocks and loss a compiler takes, and count its graphs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lmtrain.models.layers.block import MLP
from tests.layouts.cases import Case
from tests.layouts.toy_data import loader_of
from tests.layouts.training import build, dp_index


def graphs(name: str, bug: str | None = None) -> dict[str, Any]:
    """Breaks by their reason, and how many different graphs there are, of a step.

    because: what breaks a graph is found while it is traced, so nothing has to be compiled to machine code
    """
    case = replace(Case.named(name), compile=True)
    assert not case.problems()
    torch._dynamo.reset()
    counters.clear()
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")))
        for owner, attribute, instead in BUGS[bug] if bug else ():
            stack.enter_context(patch.object(owner, attribute, instead))
        model = build(case)
        model.forward_backward(loader_of(case, dp_index(case)).read(0))
    return {"breaks": dict(counters["graph_break"]), "graphs": counters["stats"]["unique_graphs"]}


def _breaks_in_a_block(self: Any, *args: Any) -> Tensor:
    torch._dynamo.graph_break()
    return _mlp(self, *args)


def _breaks_on_a_number(self: Any, *args: Any) -> Tensor:
    """What depends on a value of the device stops a graph, and on a GPU the host."""
    x: Tensor = _mlp(self, *args)
    return x if x.sum().item() else x + 1


_mlp = MLP.forward
BUGS = {
    "breaks_in_a_block": [(MLP, "forward", _breaks_in_a_block)],
    "breaks_on_a_number": [(MLP, "forward", _breaks_on_a_number)],
}
