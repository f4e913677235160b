"""Who talks to whom: the axes of this rank in the layout, each with its process group.

Built once by the command line after the processes have met; read by everything in `parallel`, and by `train` for the
data's share. Must not know models. A rank makes only the groups it belongs to, so that set-up costs the same at 8
ranks and at 4,096.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lmtrain.errors import LayoutError
from lmtrain.layout import Coordinate, Layout
from lmtrain.runtime.processes.process_group import new_group


@dataclass(frozen=True)
class Axis:
    """The ranks that differ from this one in one coordinate, and where this one stands among them."""

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None  # None for an axis of one, which needs no talk
    ranks: tuple[int, ...] = (0,)
    name: str = field(default="", compare=False)  # as spans call it


@dataclass(frozen=True)
class Mesh:
    layout: Layout
    rank: int
    coordinate: Coordinate
    device_type: str
    timeout_s: float
    tp: Axis
    dp_shard: Axis
    dp_replicate: Axis
    dp: Axis  # replicate x shard: all that read different samples
    pp: Axis
    plane: Axis  # all but pp: those who hold the same stages
    world: Axis

    def data_mesh(self) -> DeviceMesh:
        """The (dp_replicate, dp_shard) plane through this rank as FSDP2 wants it, with groups for axes of one too."""
        axes = (self.dp_replicate, self.dp_shard)
        alone = new_group((self.rank,), self.timeout_s) if any(axis.group is None for axis in axes) else None
        groups = [axis.group or alone for axis in axes]
        assert all(group is not None for group in groups)
        plane = torch.tensor(self.dp.ranks).view(self.dp_replicate.size, self.dp_shard.size)
        names = ("dp_replicate", "dp_shard")
        return DeviceMesh.from_group([g for g in groups if g], self.device_type, plane, mesh_dim_names=names)


def build_mesh(layout: Layout, device: torch.device, timeout_s: float = 600.0) -> Mesh:
    """Every rank calls this, in step with the others; several processes must have met before (process_group.start)."""
    ready = dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
    if size != layout.world_size:
        raise LayoutError(
            f"{size} processes have met, but the layout has {layout.world_size}. Start {layout.world_size} processes."
        )
    at = layout.coordinate(rank)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    if dist.group.WORLD is not None:
        groups[tuple(range(size))] = dist.group.WORLD

    def axis(name: str, ranks: tuple[int, ...]) -> Axis:
        if len(ranks) > 1 and ranks not in groups:
            groups[ranks] = new_group(ranks, timeout_s)
        return Axis(len(ranks), ranks.index(rank), groups[ranks] if len(ranks) > 1 else None, ranks, name)

    # because: peers find each other by ranks and order, so all ranks go through the axes in one order
    return Mesh(
        layout, rank, at, device.type, timeout_s,
        tp=axis("tp", _along(layout, at, "tp")),
        dp_shard=axis("dp_shard", _along(layout, at, "dp_shard")),
        dp_replicate=axis("dp_replicate", _along(layout, at, "dp_replicate")),
        dp=axis("dp", _along(layout, at, "dp_replicate", "dp_shard")),
        pp=axis("pp", _along(layout, at, "pp")),
        plane=axis("plane", _along(layout, at, "dp_replicate", "dp_shard", "tp")),
        world=axis("world", tuple(range(size))),
    )  # fmt: skip


def _along(layout: Layout, at: Coordinate, *names: str) -> tuple[int, ...]:
    """The ranks met when these coordinates run, the last of them fastest."""
    places = [at]
    for name in names:
        places = [replace(place, **{name: i}) for place in places for i in range(getattr(layout, name))]
    return tuple(layout.rank(place) for place in places)
