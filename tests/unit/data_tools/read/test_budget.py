"""A reader waits while bytes are in flight, and reads a long document once none are."""

from __future__ import annotations

import threading

import pytest

from data_tools.read.cut_files_into_chunks import MemoryBudget, StoppedError


def test_acquiring_within_the_budget_does_not_wait() -> None:
    budget = MemoryBudget(10)
    budget.acquire(6)
    budget.mark_in_flight(6)
    budget.acquire(4)


def test_a_document_larger_than_the_budget_passes_alone() -> None:
    budget = MemoryBudget(10)
    for _ in range(5):
        budget.acquire(7)  # one reader's own, with nothing in flight
    budget.mark_in_flight(35)


def test_the_reader_waits_for_bytes_in_flight() -> None:
    budget = MemoryBudget(10)
    budget.acquire(8)
    budget.mark_in_flight(8)
    taken = threading.Event()

    def read() -> None:
        budget.acquire(5)
        taken.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert not taken.is_set()
    budget.release_in_flight(8)
    reader.join(10)
    assert taken.is_set()


def test_stopping_ends_the_wait() -> None:
    budget = MemoryBudget(1)
    budget.acquire(1)
    budget.mark_in_flight(1)
    caught: list[bool] = []

    def read() -> None:
        try:
            budget.acquire(1)
        except StoppedError:
            caught.append(True)

    reader = threading.Thread(target=read)
    reader.start()
    budget.stop()
    reader.join(10)
    assert caught == [True]
    with pytest.raises(StoppedError):
        budget.acquire(1)
