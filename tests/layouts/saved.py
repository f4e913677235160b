"""What the forward of one microbatch keeps for its backward, measured: saved tensors, and what recompute holds besides.

Runs in workers. Storages are counted and not tensors, each once: views share. Weights and the batch are nobody's
activations; the logits have a name of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from lmtrain.models.block_stack import Stack
from lmtrain.models.layers.block import BlockContext
from tests.layouts.bugs import replaced
from tests.layouts.cases import Case
from tests.layouts.held import Sizes, sizes_of
from tests.layouts.toy_data import EvenlyMasked, loader_of
from tests.layouts.training import build, dp_index


def measure_all(names: list[str]) -> list[dict[str, int]]:
    return [measure(name) for name in names]


def measure(name: str) -> dict[str, int]:
    case = Case.named(name)
    model = build(case)
    (stage,) = model.stages.values()
    assert isinstance(stage, nn.Module)
    read = loader_of(case, dp_index(case), EvenlyMasked).read(0).microbatches[0].map(torch.as_tensor)
    batch = model.objective.prepare_batch(read)
    owned = sizes_of([*stage.parameters(), *(part for part in vars(read).values() if part is not None)])
    saved: dict[int, Tensor] = {}
    logits: Sizes = {}
    shared: list[Any] = []
    objective: Any = model.objective
    entropy, surroundings = objective.cross_entropy, Stack.block_contexts

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def note_logits(scores: Tensor, labels: Tensor, **options: Any) -> Any:
        logits.update(sizes_of([scores]))
        return entropy(scores, labels, **options)

    def note_shared(self: Stack, batch: Any) -> dict[str, BlockContext]:
        around = surroundings(self, batch)
        shared.extend(ref(tensor) for context in set(around.values()) for tensor in _tensors(context))
        return around

    aside: list[Any] = []
    objective.cross_entropy = note_logits
    with (
        replaced(Stack, "block_contexts", note_shared),
        replaced(checkpoint._VersionWrapper, "__init__", _noted(aside)),
        saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        terms = objective.loss_sums(stage, stage(batch, None), batch)
    held = [tensor for one in shared if (tensor := one()) is not None]  # by what is to be computed again
    again = [one.val for known in aside if (one := known()) is not None]
    sizes = sizes_of([*saved.values(), *held, *(value for value in again if isinstance(value, Tensor))])
    del terms
    rest = {key: size for key, size in sizes.items() if key not in owned.keys() | logits.keys()}
    return {"activations": sum(rest.values()), "logits": sum(logits.values())}


def _tensors(around: BlockContext) -> Iterator[Tensor]:
    for field in fields(around):
        value = getattr(around, field.name)
        yield from (value,) if isinstance(value, Tensor) else value or ()


def _noted(aside: list[Any]) -> Any:
    """Note the tensors that selective recompute puts aside, which no hook of autograd sees."""
    right = checkpoint._VersionWrapper.__init__

    def init(self: Any, *args: Any) -> None:
        right(self, *args)
        aside.append(ref(self))

    return init
