"""The process groups of this rank, an axis of the layout each, and the peers that agree on values.

Built once by the command line after the processes have connected; used by everything in `parallel`, and by `train` for
the data's shards. Independent of models. A rank creates only the groups it belongs to, so that set-up costs the same at
8 and at 4,096 ranks.

Peers exchange small integers on the host, apart from a model's collectives. Set-up, the loop and evaluation agree
through runtime/processes/succeed_on_all_ranks_or_none. Each group has a single purpose: messages of the checkpoint
thread, or sent while a step computes, never interleave with the collectives of training.
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
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.process_group import collective_timeout, new_group
from lmtrain.runtime.processes.succeed_on_all_ranks_or_none import SINGLE_PROCESS, Peers


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
    """A rank's coordinate in the layout, and the process group of each axis."""

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
        """Return torch's DeviceMesh for FSDP2, with dims dp_replicate and dp_shard: the ranks that hold the same
        pipeline stage and tensor-parallel part as this rank. Axes of size 1 get a process group too.
        """
        axes = (self.dp_replicate, self.dp_shard)
        own_group = new_group((self.rank,), self.timeout_s) if any(axis.group is None for axis in axes) else None
        groups = [axis.group or own_group for axis in axes]
        assert all(group is not None for group in groups)
        plane = torch.tensor(self.dp.ranks).view(self.dp_replicate.size, self.dp_shard.size)
        return DeviceMesh.from_group(
            [g for g in groups if g], self.device_type, plane, mesh_dim_names=("dp_replicate", "dp_shard")
        )


def build_mesh(layout: Layout, device: torch.device, timeout_s: float = 600.0) -> Mesh:
    """Create this rank's process groups, one per axis of the layout, and return them as a Mesh. Every rank calls this;
    with several ranks torch.distributed must be initialized. `timeout_s` limits each collective.

    Raise LayoutError if the number of processes is not the layout's.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if size != layout.world_size:
        raise LayoutError(
            f"{size} processes were started, but the layout needs {layout.world_size}. "
            f"Start {layout.world_size} processes."
        )
    coordinate = layout.coordinate(rank)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    if dist.group.WORLD is not None:
        groups[tuple(range(size))] = dist.group.WORLD

    def axis(name: str, ranks: tuple[int, ...]) -> Axis:
        if len(ranks) > 1 and ranks not in groups:
            groups[ranks] = new_group(ranks, timeout_s)
        return Axis(len(ranks), ranks.index(rank), groups[ranks] if len(ranks) > 1 else None, ranks, name)

    # because: a group's ranks must create it in the same order, so all ranks create the axes in this order
    return Mesh(
        layout, rank, coordinate, device.type, timeout_s,
        tp=axis("tp", _ranks_along(layout, coordinate, "tp")),
        dp_shard=axis("dp_shard", _ranks_along(layout, coordinate, "dp_shard")),
        dp_replicate=axis("dp_replicate", _ranks_along(layout, coordinate, "dp_replicate")),
        dp=axis("dp", _ranks_along(layout, coordinate, "dp_replicate", "dp_shard")),
        pp=axis("pp", _ranks_along(layout, coordinate, "pp")),
        plane=axis("plane", _ranks_along(layout, coordinate, "dp_replicate", "dp_shard", "tp")),
        world=axis("world", tuple(range(size))),
    )  # fmt: skip


def _ranks_along(layout: Layout, coordinate: Coordinate, *names: str) -> tuple[int, ...]:
    """Return the ranks whose coordinates equal `coordinate` on all axes except those in `names`, such as "tp", on which
    they may be any. They are ordered by `names`, the last of which varies fastest.
    """
    coordinates = [coordinate]
    for name in names:
        coordinates = [replace(other, **{name: i}) for other in coordinates for i in range(getattr(layout, name))]
    return tuple(layout.rank(other) for other in coordinates)


class GroupPeers:
    """The processes of the run, over a separate gloo group. Every process creates it at the same point."""

    def __init__(self, mesh: Mesh, place: current_phase.ThreadPosition, wait_name: str = "an agreement") -> None:
        """Create the group. `place` is the thread in whose trace a wait appears, `wait_name` the wait's name there."""
        self.rank, self.num_ranks, self.world = mesh.rank, mesh.world.size, mesh.world
        self.place, self.wait_name = place, wait_name
        self.group = dist.new_group(backend="gloo", timeout=collective_timeout(mesh.timeout_s))

    def start_gather(self, numbers: Sequence[int], *, early: bool = True) -> Callable[[], NDArray[np.int64]]:
        """Start to gather `numbers` from every rank, equally many on each. Return a function that waits and returns
        them as an array with a row per rank. `early` says in traces that the gather started before its result was
        needed.
        """
        own_row = torch.tensor(list(numbers), dtype=torch.int64)
        rows = torch.empty(self.num_ranks, len(own_row), dtype=torch.int64)
        # collective: gathers each process's numbers over the world, on the host
        work = dist.all_gather(list(rows), own_row, group=self.group, async_op=True)

        def wait_for_rows() -> NDArray[np.int64]:
            with current_phase.within("collective", self.wait_name, self.place, self.world, own_row, early=early):
                work.wait()
            return rows.numpy()

        return wait_for_rows

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather `numbers` from every rank, equally many on each, and return a list of them per rank, in rank order."""
        rows: list[list[int]] = self.start_gather(numbers, early=False)().tolist()
        return rows


def main_thread_peers(mesh: Mesh) -> Peers:
    """Return the peers for the processes' main threads."""
    return GroupPeers(mesh, current_phase.main) if mesh.world.size > 1 else SINGLE_PROCESS


def saver_thread_peers(mesh: Mesh) -> Peers:
    """Return the peers for the threads that write checkpoints."""
    return GroupPeers(mesh, current_phase.saver) if mesh.world.size > 1 else SINGLE_PROCESS


class DefaultGroupPeers:
    """The processes of the run over torch's default group, before a mesh exists; for their main threads.

    because: the messages of gloo's all-gather grow as n^2, those of an exchange through rank 0 as n
    """

    def __init__(self, wait_name: str) -> None:
        self.rank, self.num_ranks, self.wait_name = dist.get_rank(), dist.get_world_size(), wait_name

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather `numbers` from every rank, equally many on each, and return a list of them per rank, in rank order."""
        own_row = torch.tensor(list(numbers), dtype=torch.int64)
        rows = torch.empty(self.num_ranks, len(own_row), dtype=torch.int64)
        with current_phase.within("collective", self.wait_name):
            # collective: gathers a row per process to rank 0 and broadcasts all rows to the world, on the host
            dist.gather(own_row, list(rows) if self.rank == 0 else None)
            dist.broadcast(rows, 0)
        return rows.tolist()


def peers_before_mesh(wait_name: str) -> Peers:
    """Return the peers for an exchange of numbers over torch's default group, before a mesh exists or once per batch of
    texts. `wait_name` is how traces name the wait.
    """
    return DefaultGroupPeers(wait_name) if dist.is_initialized() and dist.get_world_size() > 1 else SINGLE_PROCESS
