"""Threads that stand for the processes of a run and tell each other numbers, as `checkpoint.ranks.Peers` asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

Outcome = Any  # what a rank's work gave, or the exception that it raised


class Table:
    """Where threads that stand for processes lay their numbers; a rank that never comes fails the test in time."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._rows: list[list[int]] = [[]] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=120)

    def seat(self, rank: int) -> Seat:
        return Seat(self, rank)

    def exchange(self, rank: int, numbers: Sequence[int]) -> list[list[int]]:
        self._rows[rank] = list(numbers)
        self._barrier.wait()
        rows = [list(row) for row in self._rows]
        assert len({len(row) for row in rows}) == 1, "the ranks are in different phases"
        self._barrier.wait()
        return rows


class Seat:
    def __init__(self, table: Table, rank: int) -> None:
        self.rank, self.num_ranks, self._table = rank, table.num_ranks, table

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._table.exchange(self.rank, numbers)


def on_ranks(num_ranks: int, work: Callable[[Seat], Outcome]) -> list[Outcome]:
    """Do the work once a rank, all at the same time."""
    table = Table(num_ranks)
    outcomes: list[Outcome] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            outcomes[rank] = work(table.seat(rank))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return outcomes
