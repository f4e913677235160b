"""Whole weights for the optimizers that look at them, gathered from the shards of a layout and cut again.

Made by ParallelModel, called by LAMB (sums) and Muon (whole matrices) through optim.whole.Whole. Every rank of a
tensor- and data-parallel plane calls in the same order, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.parallel.collectives import all_reduce, broadcast, gather_stack
from lmtrain.parallel.mesh import Axis, Mesh
from lmtrain.placement.places import Place
from lmtrain.spec import Split


class Spread:
    """Each weight lies in shards of rows (dp_shard) of parts (tp), and dp_replicate holds that several times."""

    def __init__(self, places: Mapping[str, Place], mesh: Mesh) -> None:
        self.places, self.mesh = places, mesh
        self._held: dict[tuple[str, ...], Tensor] = {}

    @property
    def sharers(self) -> int:
        return self.mesh.plane.size

    @property
    def number(self) -> int:
        return self.mesh.plane.index

    def handed(self, owner: int, tensor: Tensor) -> Tensor:
        return broadcast(tensor, self.mesh.plane, owner, "what one has worked out")

    def sum(self, names: Sequence[str], values_PN: Tensor) -> Tensor:
        held_P1 = self._held.get(tuple(names))
        if held_P1 is None:  # once, since it is a copy from the host
            held_P1 = values_PN.new_tensor([[self.places[name].num_holders] for name in names])
            self._held[tuple(names)] = held_P1
        # collective: sums over local shards, over all who hold these stages; what several hold is divided among them
        return all_reduce(values_PN / held_P1, self.mesh.plane, what="sums over whole weights")

    def gather(self, name: str, local: Tensor) -> list[Tensor]:
        place = self.places[name]
        part = _gather_rows(local, place, self.mesh.dp_shard)
        if place.cut.split is Split.NONE or self.mesh.tp.size == 1:
            return list(torch.split(part[: place.global_shape[0]], list(place.sections)))
        # collective: nothing is summed; tp ranks' parts of one weight
        parts = gather_stack(part, self.mesh.tp, "whole weights").unbind()
        match place.cut.split:
            case Split.ROW:
                return list(torch.split(torch.cat(parts, dim=1), list(place.sections)))
            case Split.VOCAB:
                return [torch.cat(parts)[: place.global_shape[0]]]
        cut = [torch.split(part, [size // self.mesh.tp.size for size in place.sections]) for part in parts]
        return [torch.cat(section) for section in zip(*cut, strict=True)]

    def part(self, name: str, sections: list[Tensor]) -> Tensor:
        place, tp = self.places[name], self.mesh.tp
        match place.cut.split:
            case Split.ROW:
                part = torch.cat(sections).chunk(tp.size, dim=1)[tp.index]
            case Split.COLUMN:
                part = torch.cat([section.chunk(tp.size)[tp.index] for section in sections])
            case Split.VOCAB:
                rows = place.part_shape[0]
                part = _pad_rows(sections[0], rows * tp.size)[tp.index * rows : (tp.index + 1) * rows]
            case _:
                part = torch.cat(sections)
        return part[place.rows.start : place.rows.stop]


def _gather_rows(local: Tensor, place: Place, shards: Axis) -> Tensor:
    """Gather all rows of this tp rank's part; shards are padded to equal size."""
    if shards.size == 1:
        return local
    rows = -(-place.part_shape[0] // shards.size)
    # collective: nothing is summed; data-parallel shards of one weight
    return gather_stack(_pad_rows(local, rows), shards, "whole weights").flatten(0, 1)[: place.part_shape[0]]


def _pad_rows(tensor: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - tensor.shape[0]
    return F.pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, missing)) if missing else tensor
