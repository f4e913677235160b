"""Whole weights for optimizers that need them, gathered from a layout's shards and sharded again.

Created by ParallelModel, called by LAMB (sums) and Muon (whole matrices) through
optim.interface_to_whole_weights.WholeTensors. Collective: every rank of a tensor- and data-parallel plane calls in the
same order, whatever shards it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.parallel.mesh import Axis, Mesh
from lmtrain.parallel.tp_linears_and_collectives import all_reduce, broadcast, gather_stack
from lmtrain.placement.layers_and_shards_of_ranks import Placement, section_parts
from lmtrain.spec import Split


class ShardedTensors:
    """Access to weights in row shards (dp_shard) of parts (tp), with dp_replicate copies of each."""

    def __init__(self, placements: Mapping[str, Placement], mesh: Mesh) -> None:
        self.placements, self.mesh = placements, mesh
        self._num_holders: dict[tuple[str, ...], Tensor] = {}  # names -> column of their numbers of holders

    @property
    def num_sharers(self) -> int:
        return self.mesh.plane.size

    @property
    def sharer_index(self) -> int:
        return self.mesh.plane.index

    def broadcast(self, owner: int, tensor: Tensor) -> Tensor:
        return broadcast(tensor, self.mesh.plane, owner, "a sharer's matrix")

    def counted(self, name: str, shard: Tensor) -> Tensor:
        return shard[: self.placements[name].counted_rows]

    def sum_over_shards(self, names: Sequence[str], values_PN: Tensor) -> Tensor:
        holders_P1 = self._num_holders.get(tuple(names))
        if holders_P1 is None:  # cached, because it is copied from the host
            holders_P1 = values_PN.new_tensor([[self.placements[name].num_holders] for name in names])
            self._num_holders[tuple(names)] = holders_P1
        # collective: sums over the plane; values that several ranks hold are divided by the number of holders
        return all_reduce(values_PN / holders_P1, self.mesh.plane, wait_name="sums over whole weights")

    def gather_sections(self, name: str, shard: Tensor) -> list[Tensor]:
        placement = self.placements[name]
        tp_part = _gather_rows(shard, placement, self.mesh.dp_shard)
        if placement.cut.split is Split.NONE or self.mesh.tp.size == 1:
            return list(torch.split(tp_part[: placement.global_shape[0]], list(placement.sections)))
        # collective: gathers the tp ranks' parts of a weight
        tp_parts = gather_stack(tp_part, self.mesh.tp, "whole weights").unbind()
        match placement.cut.split:
            case Split.ROW:
                return list(torch.split(torch.cat(tp_parts, dim=1), list(placement.sections)))
            case Split.VOCAB:
                return [torch.cat(tp_parts)[: placement.global_shape[0]]]
        held = section_parts(placement.global_shape[0], placement.cut, self.mesh.tp.size)
        sizes = [rows for rows, _ in held]
        sections_of_parts = zip(*(torch.split(tp_part, sizes) for tp_part in tp_parts), strict=True)
        return [
            torch.cat(parts[::num_sharing])
            for parts, (_, num_sharing) in zip(sections_of_parts, held, strict=True)
        ]

    def local_shard(self, name: str, sections: list[Tensor]) -> Tensor:
        placement, tp = self.placements[name], self.mesh.tp
        match placement.cut.split:
            case Split.ROW:
                part = torch.cat(sections).chunk(tp.size, dim=1)[tp.index]
            case Split.COLUMN:
                held = section_parts(placement.global_shape[0], placement.cut, tp.size)
                part = torch.cat([
                    torch.split(section, rows)[tp.index // num_sharing]
                    for section, (rows, num_sharing) in zip(sections, held, strict=True)
                ])
            case Split.VOCAB:
                rows = placement.part_shape[0]
                part = _pad_rows(sections[0], rows * tp.size)[tp.index * rows : (tp.index + 1) * rows]
            case _:
                part = torch.cat(sections)
        return part[placement.rows.start : placement.rows.stop]


def _gather_rows(local: Tensor, placement: Placement, shards: Axis) -> Tensor:
    """Return all rows of this tp rank's part of a weight, gathered from the data-parallel ranks of the axis `shards`;
    `local` holds this rank's rows. The last shards may be shorter, so shards are padded to equal size.
    """
    if shards.size == 1:
        return local
    rows = -(-placement.part_shape[0] // shards.size)
    # collective: gathers the data-parallel shards of a weight
    return gather_stack(_pad_rows(local, rows), shards, "whole weights").flatten(0, 1)[: placement.part_shape[0]]


def _pad_rows(tensor: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - tensor.shape[0]
    return F.pad(tensor, (*(0, 0) * (tensor.ndim - 1), 0, missing)) if missing else tensor
