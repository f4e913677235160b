"""Which stages a rank holds, with which layers and parameters. Torch-free; called by apply and the layout table."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from lmtrain.layout import Coordinate
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.placement.places import Place, place_all
from lmtrain.spec import ModelShape


@dataclass(frozen=True)
class Stage:
    number: int
    layers: range
    first: bool
    last: bool


def stages_of_rank(settings: ModelSettings, parallel: ParallelSettings, rank: int) -> list[Stage]:
    """`rank` counts along pp. A model that is not cut is one stage."""
    return list(_stages(settings, parallel).get(rank, ()))


@lru_cache(maxsize=4)  # because: who asks for one rank asks for all
def _stages(settings: ModelSettings, parallel: ParallelSettings) -> dict[int, list[Stage]]:
    owners = parallel.pipeline.ranks_of_stages(parallel.pp, parallel.vp) if parallel.pp > 1 else (0,)
    after = head_cost(settings.shape) if parallel.balance == "cost" else 0.0
    layers = layers_of_stages(settings.shape.num_layers, len(owners), after=after)
    last, found = len(owners) - 1, dict[int, list[Stage]]()
    for number, owner in enumerate(owners):
        found.setdefault(owner, []).append(Stage(number, layers[number], number == 0, number == last))
    return found


def names_of_rank(settings: ModelSettings, stages: list[Stage]) -> list[str]:
    """The parameters of these stages by their names in a checkpoint: a copy counts as what it copies."""
    last = any(stage.last for stage in stages)
    held = {layer for stage in stages for layer in stage.layers}
    held |= {-1} if any(stage.first for stage in stages) else set()
    held |= {settings.shape.num_layers} if last else set()
    copied = {tie.first for tie in settings.ties()} if last else set()
    every = _weights_of_layers(settings)
    wanted = {place for layer in held for place in every.get(layer, ())}
    wanted |= {(at, name) for weights in every.values() for at, name in weights if name in copied} if copied else set()
    return [name for _, name in sorted(wanted)]


@lru_cache(maxsize=4)
def _weights_of_layers(settings: ModelSettings) -> dict[int, list[tuple[int, str]]]:
    """The names of each layer's parameters, with their places in the list of all."""
    found: dict[int, list[tuple[int, str]]] = {}
    for at, name in enumerate(settings.weights()):
        found.setdefault(settings.layer_of(name), []).append((at, name))
    return found


def places_of_rank(settings: ModelSettings, parallel: ParallelSettings, at: Coordinate) -> dict[str, Place]:
    """Where this rank's numbers live in the whole model."""
    weights = settings.weights()
    held = {name: weights[name] for name in names_of_rank(settings, stages_of_rank(settings, parallel, at.pp))}
    return place_all(held, settings.cuts(), parallel.layout, at, settings.shape.vocab_size)


def layers_of_stages(num_layers: int, num_stages: int, before: float = 0.0, after: float = 0.0) -> list[range]:
    """Runs of layers; a stage may have none. A layer costs 1; embedding and head cost `before` and `after` layers.

    Layer after layer goes to the stage that has least so far, which makes the dearest stage as cheap as can be. With
    costs of 0 lengths differ by one at most, and the longer ones come first.
    """
    loads = [0.0] * num_stages
    loads[0] += before
    loads[-1] += after
    counts, heap = [0] * num_stages, [(load, stage) for stage, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(num_layers):
        load, stage = heap[0]
        heapq.heapreplace(heap, (load + 1, stage))
        counts[stage] += 1
    return [range(first, stop) for first, stop in pairwise([0, *accumulate(counts)])]


def head_cost(shape: ModelShape) -> float:
    """What the head costs, in layers: its product with the vocabulary beside the products of a block."""
    return shape.width * shape.vocab_size / shape.block_matrix_params
