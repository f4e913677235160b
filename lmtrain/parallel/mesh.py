"""Who talks to whom: the axes of this rank in the layout, each with its process group; and the processes of a run.

Built once by the command line after the processes have met; read by everything in `parallel`, and by `train` for the
data's share. Must not know models. A rank makes only the groups it belongs to, so that set-up costs the same at 8
ranks and at 4,096.

Peers are the way by which those numbers go round on which the processes agree: on the host, apart from a model's.
Set-up, the loop and evaluation agree as runtime/processes/agreement says. Each group has one purpose: what is said from
the checkpoint's thread, or while a step computes, never meets the collectives of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from lmtrain.errors import LayoutError
from lmtrain.layout import Coordinate, Layout
from lmtrain.observe.measure import phases
from lmtrain.runtime.processes.agreement import ALONE, Peers
from lmtrain.runtime.processes.process_group import backstop, new_group


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
        """Return the (dp_replicate, dp_shard) plane through this rank for FSDP2, with groups for axes of one too."""
        axes = (self.dp_replicate, self.dp_shard)
        alone = new_group((self.rank,), self.timeout_s) if any(axis.group is None for axis in axes) else None
        groups = [axis.group or alone for axis in axes]
        assert all(group is not None for group in groups)
        plane = torch.tensor(self.dp.ranks).view(self.dp_replicate.size, self.dp_shard.size)
        return DeviceMesh.from_group(
            [g for g in groups if g], self.device_type, plane, mesh_dim_names=("dp_replicate", "dp_shard")
        )


def build_mesh(layout: Layout, device: torch.device, timeout_s: float = 600.0) -> Mesh:
    """Build the mesh; every rank calls this, after several processes have met (process_group.start)."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
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
    """Return the ranks along these axes, the last axis fastest."""
    places = [at]
    for name in names:
        places = [replace(place, **{name: i}) for place in places for i in range(getattr(layout, name))]
    return tuple(layout.rank(place) for place in places)


class GroupPeers:
    """All processes of the run, over a group of their own. Made by all of them at the same point."""

    def __init__(self, mesh: Mesh, place: phases.Place, what: str = "an agreement") -> None:
        self.rank, self.num_ranks, self.world = mesh.rank, mesh.world.size, mesh.world
        self.place, self.what = place, what  # whose marks say that it waits, and for what
        self.group = dist.new_group(backend="gloo", timeout=backstop(mesh.timeout_s))

    def ask(self, numbers: Sequence[int], *, early: bool = True) -> Callable[[], NDArray[np.int64]]:
        """Send numbers round while this process goes on; what comes back waits for everybody's, a row for each."""
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        rows = torch.empty(self.num_ranks, len(mine), dtype=torch.int64)
        # collective: what each process of the world says, on the host
        work = dist.all_gather(list(rows), mine, group=self.group, async_op=True)

        def heard() -> NDArray[np.int64]:
            with phases.within("collective", self.what, self.place, self.world, mine, early=early):
                work.wait()
            return rows.numpy()

        return heard

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        rows: list[list[int]] = self.ask(numbers, early=False)().tolist()
        return rows


def setup_peers(mesh: Mesh) -> Peers:
    """Return the peers for the processes' main threads."""
    return GroupPeers(mesh, phases.main) if mesh.world.size > 1 else ALONE


def saving_peers(mesh: Mesh) -> Peers:
    """Return the peers for the threads that write checkpoints."""
    return GroupPeers(mesh, phases.saver) if mesh.world.size > 1 else ALONE


class FirstPeers:
    """All processes of the run, by the group in which they have met, while there is no mesh; for their main threads.

    because: gloo's exchange among all sends a number of messages that grows as n^2, one by way of rank 0 as n.
    """

    def __init__(self, what: str) -> None:
        self.rank, self.num_ranks, self.what = dist.get_rank(), dist.get_world_size(), what

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        rows = torch.empty(self.num_ranks, len(mine), dtype=torch.int64)
        with phases.within("collective", self.what):
            # collective: one row from each of the world to rank 0, and all rows to the world, on the host
            dist.gather(mine, list(rows) if self.rank == 0 else None)
            dist.broadcast(rows, 0)
        return rows.tolist()


def first_peers(what: str) -> Peers:
    """Return the peers for agreements before there is a mesh; `what` names the wait for them."""
    return FirstPeers(what) if dist.is_initialized() and dist.get_world_size() > 1 else ALONE
