"""What the weights of a model cost each rank of a layout, in bytes. Torch-free.

Called by preflight's table of a layout, and by whoever plans a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lmtrain.layout import Coordinate, Layout
from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.places import Place, Shape, place_all
from lmtrain.placement.stages import Stage, names_of_rank
from lmtrain.spec import Cuts

FP32_BYTES = 4


@dataclass(frozen=True)
class RankBytes:
    """What weights cost one rank, in bytes."""

    masters: int  # fp32 weights that the optimizer owns
    work: int  # weights that compute, where they are not the masters themselves
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.masters + self.work + self.gradients + self.optimizer


@dataclass(frozen=True)
class Numbers:
    """How many numbers some weights are on one rank."""

    parts: int = 0  # of this tensor-parallel rank
    shards: int = 0  # of these, its share, padded until all have the same
    slots: int = 0  # that the optimizer remembers, which are not padded
    early: int = 0  # of the parts: what is no product's weight, so that the first half of a backward has its gradient

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(
            self.parts + other.parts, self.shards + other.shards, self.slots + other.slots, self.early + other.early,
        )  # fmt: skip

    def __sub__(self, other: Numbers) -> Numbers:
        return Numbers(
            self.parts - other.parts, self.shards - other.shards, self.slots - other.slots, self.early - other.early,
        )  # fmt: skip


def count(
    places: Iterable[Place], layout: Layout, num_slots: Callable[[str, Shape], int] = lambda name, shape: 2
) -> Numbers:
    """`num_slots`: how many tensors the optimizer keeps for a parameter of this name and whole shape."""
    places = list(places)
    return Numbers(
        sum(math.prod(place.part_shape) for place in places),
        sum(math.prod((-(-place.part_shape[0] // layout.dp_shard), *place.part_shape[1:])) for place in places),
        sum(num_slots(place.name, place.global_shape) * math.prod(place.local_shape) for place in places),
        sum(
            math.prod(place.part_shape)
            for place in places if len(place.part_shape) == 1 or place.name.startswith("embedding.")
        ),
    )  # fmt: skip


def rank_bytes(held: Numbers, layout: Layout, *, zero: int, work_bytes: int) -> RankBytes:
    """Held between two microbatches of a step, the moment that tells the levels apart.

    zero 0 and 1 keep whole gathered weights and whole gradients; 2 keeps shards of gradients; 3 keeps shards of both,
    and gathers a block at a time. `work_bytes` is the size of a number that computes.
    """
    optimizer = FP32_BYTES * held.slots
    if layout.dp == 1:
        work = 0 if work_bytes == FP32_BYTES else work_bytes * held.parts
        return RankBytes(FP32_BYTES * held.parts, work, FP32_BYTES * held.parts, optimizer)
    return RankBytes(
        masters=FP32_BYTES * held.shards,
        work=work_bytes * held.shards * layout.dp_shard if zero < 3 else 0,
        gradients=FP32_BYTES * (held.parts if zero < 2 else held.shards),
        optimizer=optimizer,
    )


def places_held(
    model: ModelSettings, stages: Sequence[Stage], layout: Layout, shard: int, weights: Weights | None = None
) -> list[Place]:
    """The weights of a rank's stages; what two of them hold a copy of each stands there twice.

    Those of equal shape and cut, as in all layers, are worked out once. `weights`, where there are many ranks to ask
    for.
    """
    weights = weights or Weights.of(model)
    both = len(stages) > 1 and stages[0].first and stages[-1].last
    names = names_of_rank(model, [*stages]) + [tie.first for tie in model.ties() if both]
    shapes = {name: weights.shapes[name] for name in names}
    alike = {(shape, weights.cuts.get(name)): name for name, shape in shapes.items()}
    places = place_all(
        {name: shapes[name] for name in alike.values()}, weights.cuts, layout, Coordinate(0, 0, shard, 0),
        weights.vocab_size,
    )  # fmt: skip
    return [replace(places[alike[shapes[name], weights.cuts.get(name)]], name=name) for name in names]


@dataclass(frozen=True)
class Weights:
    """All of a model's, listed once."""

    shapes: dict[str, Shape]
    cuts: Cuts
    vocab_size: int

    @classmethod
    def of(cls, model: ModelSettings) -> Weights:
        return cls(model.weights(), model.cuts(), model.shape.vocab_size)
