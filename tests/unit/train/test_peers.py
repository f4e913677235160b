"""What processes agree on: rows of numbers, and the step after which all stop."""

from __future__ import annotations

from typing import Any

import torch

from lmtrain.layout import Layout
from lmtrain.parallel.mesh import build_mesh
from lmtrain.runtime.signals import StopRequest
from lmtrain.train.peers import GroupPeers, StopVote, saving_peers, setup_peers
from tests.layouts.workers import Pool

CPU = torch.device("cpu")


def agree(world_size: int) -> dict[str, Any]:
    """On each rank: numbers exchanged by two groups, and three rounds of the vote with a signal on the last rank."""
    mesh = build_mesh(Layout(dp_replicate=world_size), CPU, 60.0)
    setup, saving, vote = setup_peers(mesh), saving_peers(mesh), StopVote(mesh)
    assert isinstance(saving, GroupPeers)
    rows = [peers.gather([mesh.rank, -(2**62)]) for peers in (setup, saving)]
    stop, answers = StopRequest(), []
    for number in range(3):
        vote.ask(stop)
        if number == 0 and mesh.rank == world_size - 1:
            stop.requested = "SIGUSR1"  # while the first step computes
        answers.append(vote.answer(stop))
    return {"rows": rows, "answers": answers}


def test_all_stop_after_the_same_step(pool: Pool) -> None:
    found = pool.run(f"{__name__}:agree", 3, {"world_size": 3})
    table = [[rank, -(2**62)] for rank in range(3)]
    assert [rank["rows"] for rank in found] == [[table, table]] * 3
    assert [rank["answers"] for rank in found] == [[None, "SIGUSR1", "SIGUSR1"]] * 3


def test_one_process_stops_after_the_step_of_the_signal() -> None:
    mesh = build_mesh(Layout(), CPU)
    vote, stop = StopVote(mesh), StopRequest()
    vote.ask(stop)
    assert vote.answer(stop) is None
    vote.ask(stop)
    stop.requested = "SIGTERM"
    assert vote.answer(stop) == "SIGTERM"
    assert setup_peers(mesh).gather([4]) == saving_peers(mesh).gather([4]) == [[4]]
