"""The interface by which optimizers that step on shards reach whole weights: sums, gathers and broadcasts over shards.

Optimizers step on local fp32 shards and do not depend on processes. LAMB needs norms of whole weights, Muon whole
matrices; `parallel` implements the interface. The methods are collective: every process calls them in the same order,
whatever shards it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class WholeTensors(Protocol):
    """Collective access to whole weights."""

    def counted(self, name: str, shard: Tensor) -> Tensor:
        """Return the part of this process's shard of a tensor shaped like the weight `name` that goes into sums over
        shards: other processes count the rest.
        """

    def sum_over_shards(self, names: Sequence[str], values_PN: Tensor) -> Tensor:
        """Return sums over the whole weights; row p holds the sums over what is `counted` of the weight names[p].

        An element that several processes hold counts once.
        """

    def gather_sections(self, name: str, shard: Tensor) -> list[Tensor]:
        """Return the whole tensor, gathered from its shards and split into sections, such as queries, keys and values.

        `shard` is this process's shard of a tensor shaped like the weight `name`, such as its momentum.
        """

    def local_shard(self, name: str, sections: list[Tensor]) -> Tensor:
        """Return this process's shard of whole sections: the inverse of `gather_sections`."""

    @property
    def num_sharers(self) -> int:
        """The number of processes that hold shards or copies of the same weights."""

    @property
    def sharer_index(self) -> int:
        """The index of this process among the sharers."""

    def broadcast(self, owner: int, tensor: Tensor) -> Tensor:
        """Return the tensor of the sharer with index `owner`; the other sharers pass a buffer of equal shape."""


class LocalTensors:
    """The implementation for a single process, which holds all weights.

    `sections` maps the names of fused matrices to the row counts of their sections; other matrices are one section.
    """

    def __init__(self, sections: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self.sections = sections or {}

    def counted(self, name: str, shard: Tensor) -> Tensor:
        return shard

    def sum_over_shards(self, names: Sequence[str], values_PN: Tensor) -> Tensor:
        return values_PN

    def gather_sections(self, name: str, shard: Tensor) -> list[Tensor]:
        return list(torch.split(shard, list(self.sections.get(name) or shard.shape[:1])))

    def local_shard(self, name: str, sections: list[Tensor]) -> Tensor:
        return torch.cat(sections) if len(sections) > 1 else sections[0]

    num_sharers, sharer_index = 1, 0

    def broadcast(self, owner: int, tensor: Tensor) -> Tensor:
        return tensor
