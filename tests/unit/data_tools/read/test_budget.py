"""A reader waits while others hold the memory, and passes with a long document once nobody else does."""

from __future__ import annotations

import threading

import pytest

from data_tools.read.chunks import Budget, StoppedError


def test_within_the_budget_nobody_waits() -> None:
    budget = Budget(10)
    budget.take(6)
    budget.hand_on(6)
    budget.take(4)


def test_a_document_larger_than_the_budget_passes_alone() -> None:
    budget = Budget(10)
    for _ in range(5):
        budget.take(7)  # one reader's own, with nothing in flight
    budget.hand_on(35)


def test_the_reader_waits_for_what_is_in_flight() -> None:
    budget = Budget(10)
    budget.take(8)
    budget.hand_on(8)
    taken = threading.Event()

    def read() -> None:
        budget.take(5)
        taken.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert not taken.is_set()
    budget.give_back(8)
    reader.join(10)
    assert taken.is_set()


def test_stopping_ends_the_wait() -> None:
    budget = Budget(1)
    budget.take(1)
    budget.hand_on(1)
    caught: list[bool] = []

    def read() -> None:
        try:
            budget.take(1)
        except StoppedError:
            caught.append(True)

    reader = threading.Thread(target=read)
    reader.start()
    budget.stop()
    reader.join(10)
    assert caught == [True]
    with pytest.raises(StoppedError):
        budget.take(1)
