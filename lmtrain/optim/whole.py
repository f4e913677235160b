"""What an optimizer that looks at whole weights is given: sums and gathers over whatever shards a weight lies in.

Optimizers step on local fp32 shards and know no process. LAMB needs norms of whole weights, Muon whole matrices;
`parallel` hands in how to get them. Every process calls these in the same order, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Whole(Protocol):
    def sum(self, names: Sequence[str], values_PN: Tensor) -> Tensor:
        """Row p holds sums over this process's shard of names[p]; returns those over the whole, each number once."""

    def gather(self, name: str, local: Tensor) -> list[Tensor]:
        """Gather a tensor shaped like this shard of a matrix; return its sections: queries, keys and values apart."""

    def part(self, name: str, sections: list[Tensor]) -> Tensor:
        """Return this process's shard of whole sections: the reverse of `gather`."""

    @property
    def sharers(self) -> int:
        """The number of processes that hold shards or copies of the same weights."""

    @property
    def number(self) -> int:
        """The number of this process among them."""

    def handed(self, owner: int, tensor: Tensor) -> Tensor:
        """Broadcast the tensor of process `owner` to all; the others pass one of its shape."""


class Alone:
    """One process holds everything. `sections` lists the rows of matrices that are several; others are one."""

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
