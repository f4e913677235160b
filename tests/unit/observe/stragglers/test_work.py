"""A step's own work apart from its waits, by the marks; links by both ends."""

from __future__ import annotations

from itertools import count

import pytest

from lmtrain.parallel.pipeline import stage_to_stage_messages as links_module
from lmtrain.parallel.pipeline.stage_to_stage_messages import LinkTimes
from lmtrain.runtime.processes import current_phase
from lmtrain.train import straggler_watch as work_module
from lmtrain.train.straggler_watch import COLUMNS, STEPS, WorkTimes

MS = 1_000_000


class Clock:
    """Stands still but where a test lets time go by."""

    now = 10**15

    def __call__(self) -> int:
        return self.now

    def passes(self, milliseconds: float) -> None:
        self.now += int(milliseconds * MS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (current_phase, links_module):
        monkeypatch.setattr(module, "monotonic_ns", clock)
    place = current_phase.ThreadPosition(0)
    monkeypatch.setattr(current_phase, "main", place)
    monkeypatch.setattr(work_module, "main", place)
    return clock


def step(work: WorkTimes, clock: Clock, backward_ms: float = 20.0, waited_ms: float = 0.0) -> None:
    current_phase.main.enter("data", 1)
    clock.passes(1000)  # what stands between two steps is in none
    work.begin_step()
    current_phase.main.enter("forward", microbatch=0)
    clock.passes(10)
    with current_phase.within("collective", "a sum of activations"):
        clock.passes(3)
    with current_phase.within("collective", "a message from another stage"):
        clock.passes(5)
    clock.passes(1)
    current_phase.main.enter("backward", microbatch=0)
    clock.passes(backward_ms)
    since = clock.now
    clock.passes(2)
    current_phase.main.count_wait(since)
    current_phase.main.enter("optimizer")
    clock.passes(4)
    work.end_step(waited_ms / 1000)


def test_own_work_and_waits_are_apart(clock: Clock) -> None:
    work = WorkTimes()
    for _ in range(2 + STEPS):
        assert not work.is_due
        step(work, clock, waited_ms=7.0)
    assert work.is_due
    row = dict(zip(COLUMNS, work.take_window(), strict=False))
    assert {key: value / MS for key, value in row.items() if key not in ("sent", "came")} == {
        "data": 7.0, "forward": 11.0, "backward": 20.0, "optimizer": 4.0, "messages": 5.0, "collectives": 5.0,
    }  # fmt: skip
    assert not work.is_due


def test_a_step_that_was_held_up_does_not_count(clock: Clock) -> None:
    work, backward = WorkTimes(), count()
    while not work.is_due:
        step(work, clock, backward_ms=500.0 if next(backward) % 3 == 2 else 20.0)
    assert work.take_window()[COLUMNS.index("backward")] == 20 * MS


def test_messages_of_the_first_steps_are_in_no_window(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    links = LinkTimes()
    monkeypatch.setattr(work_module, "links", links)
    work = WorkTimes()
    work.neighbours = (3,)
    sent = []
    while not work.is_due:
        work.begin_step()
        links.record_send(3)
        links.record_arrival(3, clock.now - MS)
        sent.append(clock.now)
        clock.passes(1000)
        work.end_step(0.0)
    assert work.take_window()[COLUMNS.index("sent")] == sum(sent[-STEPS:])


def test_a_link_is_seen_in_each_step_or_not_at_all(clock: Clock) -> None:
    links = LinkTimes()
    links.record_send(3)
    assert links.pop_times(3, 1) == (0, 0)  # outside of a step
    links.in_step = True
    for _ in range(4):
        links.record_send(3)
        since = clock.now
        clock.passes(2)
        links.record_arrival(3, since)
    assert links.pop_times(3, 4) == (4 * 10**15 + (0 + 2 + 4 + 6) * MS, 4 * 10**15 + (2 + 4 + 6 + 8) * MS)
    links.record_arrival(3, clock.now - 1000)  # was there before it was asked for
    links.record_send(3)
    assert links.pop_times(3, 1)[1] == 0
    links.record_send(3)
    links.record_send(3)
    links.record_arrival(3, clock.now - MS)
    assert links.pop_times(3, 2)[1] == 0  # one of two steps tells nothing
    assert links.pop_times(3, 1) == (0, 0)
