"""Which stages a rank holds, with which layers and parameters. Torch-free; called by apply and the layout table."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from lmtrain.layout import Coordinate
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.placement.places import Place, place_all
from lmtrain.schedules.choose import ranks_of_stages
from lmtrain.spec import ModelShape


@dataclass(frozen=True)
class Stage:
    number: int
    layers: range
    first: bool
    last: bool


def stages_of_rank(settings: ModelSettings, parallel: ParallelSettings, rank: int) -> list[Stage]:
    """`rank` counts along pp. A model that is not cut is one stage."""
    owners = ranks_of_stages(parallel.schedule, parallel.pp, parallel.vp) if parallel.pp > 1 else (0,)
    after = head_cost(settings.shape) if parallel.balance == "cost" else 0.0
    layers = layers_of_stages(settings.shape.num_layers, len(owners), after=after)
    last = len(owners) - 1
    return [Stage(n, layers[n], n == 0, n == last) for n, owner in enumerate(owners) if owner == rank]


def names_of_rank(settings: ModelSettings, stages: list[Stage]) -> list[str]:
    """The parameters of these stages by their names in a checkpoint: a copy counts as what it copies."""
    last = any(stage.last for stage in stages)
    held = {layer for stage in stages for layer in stage.layers}
    held |= {-1} if any(stage.first for stage in stages) else set()
    held |= {settings.shape.num_layers} if last else set()
    copied = {tie.first for tie in settings.ties()} if last else set()
    return [name for name in settings.weights() if name in copied or settings.layer_of(name) in held]


def places_of_rank(settings: ModelSettings, parallel: ParallelSettings, at: Coordinate) -> dict[str, Place]:
    """Where this rank's numbers live in the whole model."""
    weights = settings.weights()
    names = names_of_rank(settings, stages_of_rank(settings, parallel, at.pp))
    held = {name: weights[name] for name in names}
    return place_all(held, settings.cuts(), parallel.layout, at, settings.shape.vocab_size)


def layers_of_stages(num_layers: int, num_stages: int, before: float = 0.0, after: float = 0.0) -> list[range]:
    """Runs of layers; a stage may have none. A layer costs 1; embedding and head cost `before` and `after` layers.

    Layer after layer goes to the stage that has least so far, which makes the dearest stage as cheap as can be. With
    costs of 0 lengths differ by one at most, and the longer ones come first.
    """
    loads = [0.0] * num_stages
    loads[0] += before
    loads[-1] += after
    counts = [0] * num_stages
    for _ in range(num_layers):
        stage = loads.index(min(loads))
        loads[stage] += 1
        counts[stage] += 1
    return [range(first, stop) for first, stop in pairwise([0, *accumulate(counts)])]


def head_cost(shape: ModelShape) -> float:
    """What the head costs, in layers: its product with the vocabulary beside the products of a block."""
    return shape.width * shape.vocab_size / shape.block_matrix_params
