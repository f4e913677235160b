"""The layout of ranks: a rank's coordinate on (pp, dp_replicate, dp_shard, tp), and a rank's piece of a tensor.

Called by settings (is this layout possible?), parallel (which groups contain this rank?), data (which samples does this
rank read?), checkpoint (which slices does this rank hold?) and the planner. Independent of torch, processes and models.

Ranks count with tp fastest, so that a tp group is consecutive ranks of one node:
rank = ((pp * dp_replicate + r) * dp_shard + s) * tp + t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmtrain.errors import LayoutError, own

_MAX_DIVISOR = 4096  # because: a larger divisor is useless as a setting, and the search could take hours


@dataclass(frozen=True)
class Coordinate:
    """A rank's index on each axis of the layout, each from 0."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """A layout: pp stages of vp virtual chunks, dp_replicate x dp_shard data-parallel ranks, tp shards of each layer.
    """

    pp: int = 1
    vp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in ("pp", "vp", "dp_replicate", "dp_shard", "tp"):
            if getattr(self, axis) < 1:
                raise LayoutError(f"parallel.{axis}={getattr(self, axis)} must be at least 1. Use {own(1)}.")

    @property
    def dp(self) -> int:
        """The number of data-parallel ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def coordinate(self, rank: int) -> Coordinate:
        """Return a rank's index on each axis of the layout. Raise a LayoutError if there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"There is no rank {rank}: the ranks of this layout are 0 to {self.world_size - 1}.")
        rank, tp = divmod(rank, self.tp)
        rank, shard = divmod(rank, self.dp_shard)
        pp, replicate = divmod(rank, self.dp_replicate)
        return Coordinate(pp, replicate, shard, tp)

    def rank(self, coordinate: Coordinate) -> int:
        """Return the rank at this coordinate."""
        dp_index = coordinate.dp_replicate * self.dp_shard + coordinate.dp_shard
        return (coordinate.pp * self.dp + dp_index) * self.tp + coordinate.tp

    def dp_index(self, rank: int) -> int:
        """Return the rank's index among the dp data-parallel ranks, which decides the samples that the rank reads."""
        coordinate = self.coordinate(rank)
        return coordinate.dp_replicate * self.dp_shard + coordinate.dp_shard


def divisors(value: int, limit: int | None = None) -> list[int]:
    """Return the divisors of `value` up to `limit` (4096 if None or 0), in ascending order. Most layout messages
    suggest them as sizes.
    """
    largest = limit or _MAX_DIVISOR
    up_to_root = [d for d in range(1, min(math.isqrt(max(value, 0)), largest) + 1) if value % d == 0]
    return sorted({*up_to_root, *(d for divisor in up_to_root if (d := value // divisor) <= largest)})


def format_choices(values: Sequence[Any], mark: Callable[[Any], str] = str) -> str:
    """Return the values as a phrase for messages: [1, 2, 4] -> "1, 2 or 4". `mark` marks each as a way out."""
    texts = [mark(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


@dataclass(frozen=True)
class Piece:
    """A contiguous block of a global tensor, at `offset`, that a rank holds."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    block: Any  # a torch tensor or a numpy array; its shape is the piece's extent
