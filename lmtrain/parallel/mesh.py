"""The process groups of this rank, an axis of the layout each, and the peers that agree on values.

Built once by the command line after the processes have connected; used by everything in `parallel`, and by `train` for
the data's shards. Independent of models. A rank creates only the groups it belongs to, so that set-up costs the same at
8 and at 4,096 ranks.

Peers exchange small integers on the host, apart from a model's collectives. Set-up, the loop and evaluation agree
through runtime/processes/agreement. Each group has a single purpose: messages of the checkpoint thread, or sent while a
step computes, never interleave with the collectives of training.
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
    """The ranks that differ from this rank in a single coordinate, and this rank's index among them."""

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None  # None for an axis of size 1, which has no peers
    ranks: tuple[int, ...] = (0,)
    name: str = field(default="", compare=False)  # the name in trace spans


@dataclass(frozen=True)
class Mesh:
    """A rank's place in the layout and its axes."""

    layout: Layout
    rank: int
    coordinate: Coordinate
    device_type: str
    timeout_s: float
    tp: Axis
    dp_shard: Axis
    dp_replicate: Axis
    dp: Axis  # replicate x shard: the ranks that read different samples
    pp: Axis
    plane: Axis  # all axes but pp: the ranks that hold the same stages
    world: Axis

    def data_mesh(self) -> DeviceMesh:
        """Return the (dp_replicate, dp_shard) plane through this rank for FSDP2, with groups for size-1 axes too."""
        axes = (self.dp_replicate, self.dp_shard)
        alone = new_group((self.rank,), self.timeout_s) if any(axis.group is None for axis in axes) else None
        groups = [axis.group or alone for axis in axes]
        assert all(group is not None for group in groups)
        plane = torch.tensor(self.dp.ranks).view(self.dp_replicate.size, self.dp_shard.size)
        return DeviceMesh.from_group(
            [g for g in groups if g], self.device_type, plane, mesh_dim_names=("dp_replicate", "dp_shard")
        )


def build_mesh(layout: Layout, device: torch.device, timeout_s: float = 600.0) -> Mesh:
    """Build this rank's axes. Collective: every rank calls this, after process_group.start if there are several.

    Raise LayoutError if the number of processes is not the layout's.
    """
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

    # because: a group's ranks must create it in the same order, so all ranks create the axes in this order
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
    """Return the ranks reached if these coordinates vary, the last coordinate fastest."""
    places = [at]
    for name in names:
        places = [replace(place, **{name: i}) for place in places for i in range(getattr(layout, name))]
    return tuple(layout.rank(place) for place in places)


class GroupPeers:
    """All processes of the run, over a separate gloo group. Every process creates it at the same point."""

    def __init__(self, mesh: Mesh, place: phases.Place, what: str = "an agreement") -> None:
        self.rank, self.num_ranks, self.world = mesh.rank, mesh.world.size, mesh.world
        self.place, self.what = place, what  # the thread in whose trace a wait appears, and the wait's name
        self.group = dist.new_group(backend="gloo", timeout=backstop(mesh.timeout_s))

    def ask(self, numbers: Sequence[int], *, early: bool = True) -> Callable[[], NDArray[np.int64]]:
        """Start an all-gather of these numbers; the returned function waits and returns the table, a row per rank."""
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        rows = torch.empty(self.num_ranks, len(mine), dtype=torch.int64)
        # collective: gathers each process's numbers over the world, on the host
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
    """All processes of the run over torch's default group, before a mesh exists; for their main threads.

    because: the messages of gloo's all-gather grow as n^2, those of an exchange through rank 0 as n
    """

    def __init__(self, what: str) -> None:
        self.rank, self.num_ranks, self.what = dist.get_rank(), dist.get_world_size(), what

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        rows = torch.empty(self.num_ranks, len(mine), dtype=torch.int64)
        with phases.within("collective", self.what):
            # collective: gathers a row per process to rank 0 and broadcasts all rows to the world, on the host
            dist.gather(mine, list(rows) if self.rank == 0 else None)
            dist.broadcast(rows, 0)
        return rows.tolist()


def first_peers(what: str) -> Peers:
    """Return the peers for agreements before a mesh exists, or once per batch of texts; `what` names the wait."""
    return FirstPeers(what) if dist.is_initialized() and dist.get_world_size() > 1 else ALONE
