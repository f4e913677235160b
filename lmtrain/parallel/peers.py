"""By what way those numbers go round on which the processes of a run agree: on the host, apart from a model's.

Called by set-up, the loop and evaluation, which agree as runtime/processes/agreement says. Each group has one purpose:
what is said from the checkpoint's thread, or while a step computes, never meets the collectives of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lmtrain.observe.measure import phases
from lmtrain.parallel.mesh import Mesh
from lmtrain.runtime.processes.agreement import ALONE, Peers
from lmtrain.runtime.processes.process_group import backstop


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
    """For the processes' main threads."""
    return GroupPeers(mesh, phases.main) if mesh.world.size > 1 else ALONE


def saving_peers(mesh: Mesh) -> Peers:
    """For the threads that write checkpoints."""
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
        table: list[list[int]] = rows.tolist()
        return table


def first_peers(what: str) -> Peers:
    """For what is agreed on before there is a mesh, or once a batch of texts; `what` is how a wait for it is called."""
    return FirstPeers(what) if dist.is_initialized() and dist.get_world_size() > 1 else ALONE
