"""A mark says what the main thread does, and another process reads it without asking."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest

from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.current_phase import (
    NUM_BYTES,
    PHASES,
    ThreadPosition,
    read_mark,
    read_misordered,
    read_order,
    read_seen_names,
    within,
)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[mmap.mmap]:
    """As a companion sees it, of a process that begins."""
    monkeypatch.setattr(current_phase, "main", ThreadPosition(0))
    saver = ThreadPosition(current_phase.saver.offset)
    saver.phase = "save"
    monkeypatch.setattr(current_phase, "saver", saver)
    fd = current_phase.open_memory()
    with mmap.mmap(fd, NUM_BYTES, prot=mmap.PROT_READ) as reading:
        yield reading
    os.close(fd)
    current_phase.close_memory()


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_can_be_read(memory: mmap.mmap, phase: str) -> None:
    current_phase.main.enter(phase, 7, microbatch=1, stage=2)
    mark = read_mark(memory)
    assert (mark.phase, mark.step, mark.microbatch, mark.stage) == (phase, 7, 1, 2)


def test_a_step_stays_and_a_microbatch_does_not(memory: mmap.mmap) -> None:
    current_phase.main.enter("backward", 7, microbatch=1)
    current_phase.main.enter("optimizer")
    mark = read_mark(memory)
    assert (mark.phase, mark.step, mark.microbatch) == ("optimizer", 7, -1)


def test_after_a_collective_all_is_as_before(memory: mmap.mmap) -> None:
    current_phase.main.enter("backward", 7, microbatch=1)
    with within("collective", "the gradient norm"):
        inside = read_mark(memory)
    mark = read_mark(memory)
    assert (inside.phase, inside.name, inside.step, inside.microbatch, inside.num_collectives) == (
        "collective", "the gradient norm", 7, 1, 1
    )  # fmt: skip
    assert (mark.phase, mark.name, mark.microbatch) == ("backward", "", 1)
    assert mark.num_marks > inside.num_marks


def test_one_that_fails_stays_where_it_failed(memory: mmap.mmap) -> None:
    current_phase.main.enter("backward", 7)
    with pytest.raises(RuntimeError), within("collective", "losses"):
        raise RuntimeError("Connection closed by peer")
    assert read_mark(memory).name == "losses"


def test_what_has_been_gone_through_is_known_by_name(memory: mmap.mmap) -> None:
    current_phase.main.enter("build")
    with within("collective", "an agreement"):
        assert "an agreement" not in read_seen_names(memory, read_mark(memory).seen_bits)
    assert set(read_seen_names(memory, read_mark(memory).seen_bits)) == {"imports", "an agreement"}
    current_phase.main.enter("load")
    assert set(read_seen_names(memory, read_mark(memory).seen_bits)) == {"imports", "an agreement", "build"}


def test_of_a_thread_that_waits_for_the_one_that_saves_the_latter_is_told(memory: mmap.mmap) -> None:
    current_phase.main.enter("optimizer", 8)
    current_phase.saver.enter("save", 4)
    assert read_mark(memory).phase == "optimizer"
    with within("save"):
        with within("collective", "an agreement", current_phase.saver):
            found = read_mark(memory)
        assert (found.phase, found.name, found.step) == ("collective", "an agreement", 4)
        assert read_mark(memory).step == 4
        current_phase.saver.enter("save", -1)
        assert read_mark(memory).step == 8


def step(number: int, *collectives: str) -> None:
    current_phase.main.enter("data", number)
    for what in collectives:
        with within("collective", what):
            pass


def test_a_collective_that_is_left_out_shows_in_the_next(memory: mmap.mmap) -> None:
    with within("collective", "an agreement"):
        pass  # as in a run's set-up
    for number in (1, 2):
        step(number, "a sum", "a sum", "losses", "the gradient norm", "the vote on a stop")
    assert read_misordered(memory) == (0, "", "")
    step(3, "a sum", "a sum", "losses", "the vote on a stop")
    assert read_misordered(memory) == (3, "the gradient norm", "the vote on a stop")


def test_the_way_through_a_step_is_that_of_its_collectives(memory: mmap.mmap) -> None:
    names = ["a sum"] * 70 + ["losses"]
    step(1, *names)
    _, before, first = read_order(memory)
    assert before == 0  # what came before the first step is no step
    step(2, *names)
    assert read_order(memory) == (2, dict(first)[71], first)
    assert len(first) == 48
    assert {number for number, _ in first} == set(range(24, 72))
    step(3, *names[:2])
    number, before, now = read_order(memory)
    assert (number, before) == (3, dict(first)[71])
    assert [number for number, _ in sorted(now)] == [1, 2]
    step(4, *names[:2])
    assert sorted(read_order(memory)[2]) == sorted(now)
    step(5, "losses", "a sum")
    assert dict(read_order(memory)[2])[2] != dict(now)[2]


def test_what_comes_after_a_step_now_and_then_is_nothing_odd(memory: mmap.mmap) -> None:
    step(1, "losses", "the vote on a stop")
    step(2, "losses", "the vote on a stop", "sums of a validation")
    step(3, "losses", "the vote on a stop")
    assert read_misordered(memory) == (0, "", "")


def test_without_a_watch_marks_are_kept_for_the_one_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_phase, "main", ThreadPosition(0))
    current_phase.main.enter("rendezvous")
    fd = current_phase.open_memory()
    with mmap.mmap(fd, NUM_BYTES, prot=mmap.PROT_READ) as reading:
        assert read_mark(reading).phase == "rendezvous"
    os.close(fd)
    current_phase.close_memory()
    current_phase.main.enter("build")
    with within("collective", "losses"):
        pass
