"""The pool itself: results by rank, tracebacks with ranks, and what becomes of workers that die or hang."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.layouts.workers import Pool, WorkerFailed

pytestmark = pytest.mark.wide

HERE = __name__


def ranks(add: int) -> list[int]:
    total = torch.tensor([float(dist.get_rank() + add)])
    dist.all_reduce(total)
    return [dist.get_rank(), dist.get_world_size(), int(total.item())]


def alone() -> list[object]:
    return [dist.is_initialized(), os.getpid()]


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("planted failure")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        signal.pause()
    dist.barrier()


def test_each_rank_answers(pool: Pool) -> None:
    assert pool.run(f"{HERE}:ranks", 3, {"add": 1}) == [[0, 3, 6], [1, 3, 6], [2, 3, 6]]
    assert pool.run(f"{HERE}:ranks", 2, {"add": 0}) == [[0, 2, 1], [1, 2, 1]]


def test_one_process_has_no_group_and_lives_on(pool: Pool) -> None:
    ((initialised, first),) = pool.run(f"{HERE}:alone", 1)
    assert not initialised
    assert pool.run(f"{HERE}:alone", 1) == [[False, first]]


def test_a_failure_comes_with_its_rank_and_traceback(pool: Pool) -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1: Traceback[\s\S]*planted failure"):
        pool.run(f"{HERE}:fail_on", 3, {"rank": 1})
    assert len(pool.run(f"{HERE}:ranks", 3, {"add": 0})) == 3


def test_a_dead_worker_is_replaced(pool: Pool) -> None:
    with pytest.raises(WorkerFailed, match="rank 1: the process ended"):
        pool.run(f"{HERE}:die_on", 2, {"rank": 1})
    assert len(pool.run(f"{HERE}:ranks", 2, {"add": 0})) == 2


def test_a_hung_worker_is_killed_and_replaced(pool: Pool) -> None:
    with pytest.raises(WorkerFailed, match=r"rank 0: gave no answer and was killed[\s\S]*hang_on"):
        pool.run(f"{HERE}:hang_on", 2, {"rank": 0}, timeout_s=5)
    assert len(pool.run(f"{HERE}:ranks", 2, {"add": 0})) == 2
