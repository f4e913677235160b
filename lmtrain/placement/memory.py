"""What the weights of a model cost each rank of a layout, in bytes. Torch-free.

Called by preflight's table of a layout, and by whoever plans a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lmtrain.layout import Layout
from lmtrain.placement.places import Place, Shape

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


def rank_bytes(
    places: Iterable[Place],
    layout: Layout,
    *,
    zero: int,
    work_bytes: int,
    num_slots: Callable[[str, Shape], int] = lambda name, shape: 2,
) -> RankBytes:
    """Held between two microbatches of a step, the moment that tells the levels apart.

    zero 0 and 1 keep whole gathered weights and whole gradients; 2 keeps shards of gradients; 3 keeps shards of both,
    and gathers a block at a time. Shards are padded to equal size, the optimizer's state is not. `work_bytes` is the
    size of a number that computes, `num_slots` how many tensors the optimizer keeps for a parameter of this name and
    whole shape.
    """
    places = list(places)
    parts = sum(math.prod(place.part_shape) for place in places)
    slots = sum(num_slots(place.name, place.global_shape) * math.prod(place.local_shape) for place in places)
    optimizer = FP32_BYTES * slots
    if layout.dp == 1:
        work = 0 if work_bytes == FP32_BYTES else work_bytes * parts
        return RankBytes(FP32_BYTES * parts, work, FP32_BYTES * parts, optimizer)
    shards = sum(_padded_shard(place.part_shape, layout.dp_shard) for place in places)
    return RankBytes(
        masters=FP32_BYTES * shards,
        work=work_bytes * shards * layout.dp_shard if zero < 3 else 0,
        gradients=FP32_BYTES * (parts if zero < 2 else shards),
        optimizer=optimizer,
    )


def _padded_shard(shape: Shape, num_shards: int) -> int:
    return math.prod((-(-shape[0] // num_shards), *shape[1:]))
