"""Which stages a rank holds, with which layers and parameters. Torch-free; called by apply and the layout table."""

from __future__ import annotations

from dataclasses import dataclass

from lmtrain.layout import Coordinate
from lmtrain.models.model_settings import ModelSettings
from lmtrain.parallel.parallel_settings import ParallelSettings
from lmtrain.parallel.placement import Place, place_all
from lmtrain.schedules.choose import ranks_of_stages
from lmtrain.schedules.stages import head_cost, layers_of_stages


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
    layers = {layer for stage in stages for layer in stage.layers}
    first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
    copied = {tie.first for tie in settings.ties()} if last else set()
    result = []
    for name in settings.weights():
        top, _, rest = name.partition(".")
        if top == "blocks":
            held = int(rest.partition(".")[0]) in layers
        else:
            held = (first if top == "embedding" else last) or name in copied
        if held:
            result.append(name)
    return result


def places_of_rank(settings: ModelSettings, parallel: ParallelSettings, at: Coordinate) -> dict[str, Place]:
    """Where this rank's numbers live in the whole model."""
    weights = settings.weights()
    names = names_of_rank(settings, stages_of_rank(settings, parallel, at.pp))
    held = {name: weights[name] for name in names}
    return place_all(held, settings.cuts(), parallel.layout, at, settings.shape.vocab_size)
