"""What the processes of a run agree on outside the model: set-up, checkpoints, and what a step's end is to bring.

Called by set-up and the loop. Integers over process groups on the host, each group for one purpose: what is said from
the checkpoint's thread, or while a step computes, never meets the collectives of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lmtrain.checkpoint.save.agreement import ALONE, Peers
from lmtrain.observe.measure import phases
from lmtrain.parallel.mesh import Mesh
from lmtrain.runtime.processes.process_group import backstop


class GroupPeers:
    """All processes of the run, over a group of their own. Made by all of them at the same point."""

    def __init__(self, mesh: Mesh, place: phases.Place) -> None:
        self.rank, self.num_ranks, self.world = mesh.rank, mesh.world.size, mesh.world
        self.place = place  # whose marks say that it waits
        self.group = _new_group(mesh.timeout_s)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        with phases.within("collective", "an agreement", self.place, self.world, mine):
            dist.all_gather(rows, mine, group=self.group)
        return [row.tolist() for row in rows]


def setup_peers(mesh: Mesh) -> Peers:
    """For the processes' main threads."""
    return GroupPeers(mesh, phases.main) if mesh.world.size > 1 else ALONE


def saving_peers(mesh: Mesh) -> Peers:
    """For the threads that write checkpoints."""
    return GroupPeers(mesh, phases.saver) if mesh.world.size > 1 else ALONE


class Vote:
    """Numbers of which all processes come to know the highest after the same step.

    The question goes round while the step computes, so nothing waits for it: what one of several processes says counts
    after the step that follows, what the only one says after the step it fell into.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._world, self._rank, self._num_ranks, self._num_asked = mesh.world, mesh.rank, mesh.world.size, 0
        self._group = _new_group(mesh.timeout_s) if mesh.world.size > 1 else None
        self._numbers = torch.zeros(0, dtype=torch.int64)
        self._work: dist.Work | None = None

    def ask(self, mine: Callable[[], Sequence[int]], told: Sequence[int] = ()) -> None:
        """Before a step; everybody gives equally many numbers, each time. `told`, from 0 up, is for `heard`."""
        if self._group is not None:
            asked = mine()
            self._num_asked = len(asked)
            self._numbers = torch.zeros(len(asked) + self._num_ranks * len(told), dtype=torch.int64)
            self._numbers[: len(asked)] = torch.tensor(asked, dtype=torch.int64)
            if told:  # because: the highest of one's number and others' zeros is one's number
                self._numbers[len(asked) :].view(self._num_ranks, -1)[self._rank] = torch.tensor(told)
            # collective: what the world asks for, on the host, waited for after the step
            self._work = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def answer(self, mine: Callable[[], Sequence[int]]) -> list[int]:
        """After the step, on every process the same."""
        if self._work is None:
            return list(mine())
        with phases.within("collective", "the vote on a stop", None, self._world, self._numbers, early=True):
            self._work.wait()
        return [int(number) for number in self._numbers[: self._num_asked].tolist()]

    def heard(self) -> NDArray[np.int64] | None:
        """After the answer: a row of what each process told, if they did."""
        rows = self._numbers[self._num_asked :]
        return rows.view(self._num_ranks, -1).numpy() if len(rows) else None


def _new_group(timeout_s: float) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=backstop(timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group
