"""The interface to whole weights for optimizers that step on shards: sums, gathers and broadcasts over the shards.

Optimizers step on local fp32 shards and do not depend on processes. LAMB needs norms of whole weights, Muon whole
matrices; `parallel` implements the interface. The methods are collective: every process calls them in the same order,
whatever shards it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Whole(Protocol):
    """Collective access to whole weights."""

    def sum(self, names: Sequence[str], values_PN: Tensor) -> Tensor:
        """Sum over shards: row p holds sums over this process's shard of names[p]. Count every element once."""

    def gather(self, name: str, local: Tensor) -> list[Tensor]:
        """Return the whole tensor from its shards, split into sections, such as queries, keys and values."""

    def part(self, name: str, sections: list[Tensor]) -> Tensor:
        """Return this process's shard of whole sections: the inverse of `gather`."""

    @property
    def sharers(self) -> int:
        """The number of processes that hold shards or copies of the same weights."""

    @property
    def number(self) -> int:
        """The index of this process among the sharers."""

    def handed(self, owner: int, tensor: Tensor) -> Tensor:
        """Broadcast the tensor of the process with index `owner`; the other sharers pass a tensor of equal shape."""


class Alone:
    """The implementation for a single process, which holds all weights.

    `sections` lists the row counts of matrices that consist of several; other matrices are a single section.
    """

    def __init__(self, sections: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self.sections = sections or {}

    def sum(self, names: Sequence[str], values_PN: Tensor) -> Tensor:
        return values_PN

    def gather(self, name: str, local: Tensor) -> list[Tensor]:
        return list(torch.split(local, list(self.sections.get(name) or local.shape[:1])))

    def part(self, name: str, sections: list[Tensor]) -> Tensor:
        return torch.cat(sections) if len(sections) > 1 else sections[0]

    sharers, number = 1, 0

    def handed(self, owner: int, tensor: Tensor) -> Tensor:
        return tensor
