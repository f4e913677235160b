"""Agreement of processes: rows of numbers, and requests at the end of a step."""

from __future__ import annotations

from typing import Any

import torch

from lmtrain.layout import Layout
from lmtrain.parallel.mesh import GroupPeers, build_mesh, main_thread_peers, saver_thread_peers
from lmtrain.train.in_loop.save_and_stop_requests import Vote
from tests.layouts.workers import Pool

CPU = torch.device("cpu")


def agree(world_size: int) -> dict[str, Any]:
    """Return on each rank the numbers that two groups exchange, and three votes in which all wish their rank."""
    mesh = build_mesh(Layout(dp_replicate=world_size), CPU, 60.0)
    setup, saving, vote = main_thread_peers(mesh), saver_thread_peers(mesh), Vote(mesh)
    assert isinstance(saving, GroupPeers)
    rows = [peers.gather([mesh.rank, -(2**62)]) for peers in (setup, saving)]
    mine, answers = [0, 0], []
    for number in range(3):
        vote.start(lambda: mine)
        if number == 0:
            mine[1] = mesh.rank  # while the first step computes
        answers.append(vote.finish(lambda: mine))
    return {"rows": rows, "answers": answers}


def test_all_hear_of_a_wish_after_the_same_step(pool: Pool) -> None:
    found = pool.run(f"{__name__}:agree", 3, {"world_size": 3})
    table = [[rank, -(2**62)] for rank in range(3)]
    assert [rank["rows"] for rank in found] == [[table, table]] * 3
    assert [rank["answers"] for rank in found] == [[[0, 0], [0, 2], [0, 2]]] * 3


def test_one_process_hears_itself_after_the_step_of_the_wish() -> None:
    mesh = build_mesh(Layout(), CPU)
    vote, mine = Vote(mesh), [0]
    vote.start(lambda: mine)
    assert vote.finish(lambda: mine) == [0]
    vote.start(lambda: mine)
    mine[0] = 2
    assert vote.finish(lambda: mine) == [2]
    assert main_thread_peers(mesh).gather([4]) == saver_thread_peers(mesh).gather([4]) == [[4]]
