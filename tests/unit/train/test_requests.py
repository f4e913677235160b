"""Requests to stop or save: the clock, files, an interval. No test waits, since the time is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmtrain.batch import Batch
from lmtrain.layout import Layout
from lmtrain.observe.measure.process_and_gpu_memory import Memory
from lmtrain.parallel.mesh import build_mesh
from lmtrain.runtime.processes.stop_signals import StopRequest
from lmtrain.train.in_loop.save_and_stop_requests import (
    NO_TIME_FOR,
    SAVE,
    STOP,
    Deadline,
    FileRequest,
    FullestMemory,
    MeasurementCutOff,
    Requests,
    RequestSource,
    SaveInterval,
    SignalSource,
    Vote,
)
from lmtrain.train.step_and_save_durations import EVALUATION, VALIDATION, Durations


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def costs(clock: Callable[[], float]) -> Durations:
    """A step of 2 s, a save of 10, a validation of 5 and an evaluation of 60."""
    known = Durations(clock=clock)
    for what, seconds in (("step", 2.0), (VALIDATION, 5.0), (EVALUATION, 60.0)):
        known.add(what, seconds)
    known.add_save(write_s=9.0, stall_s=1.0)
    return known


def requests(*askers: RequestSource, said: list[str] | None = None) -> Requests:
    found = Requests(Vote(build_mesh(Layout(), torch.device("cpu"))), said.append if said is not None else print)
    found.add_sources(*askers)
    return found


@pytest.mark.parametrize(
    ("left", "wishes"),
    [
        (1000.0, 0),
        (80.0, 0),
        (77.9, NO_TIME_FOR[EVALUATION]),  # 4 for the end, 10 for the save, 4 for two steps, 60 for the evaluation
        (22.9, NO_TIME_FOR[EVALUATION] + NO_TIME_FOR[VALIDATION]),
        (17.9, NO_TIME_FOR[EVALUATION] + NO_TIME_FOR[VALIDATION] + STOP),
    ],
)
def test_a_deadline_leaves_time_for_the_save(left: float, wishes: int) -> None:
    clock = Clock()
    assert Deadline("the end", lambda: left, costs(clock), lambda: False, margin_s=4.0).requested() == wishes


def test_a_save_under_way_is_waited_for() -> None:
    deadline = Deadline("the end", lambda: 25.0, costs(Clock()), lambda: True, margin_s=4.0)
    assert deadline.requested() & STOP


def test_the_margin_is_a_share_of_what_is_left_at_first_and_no_end_asks_for_nothing() -> None:
    left: list[float | None] = [None]
    deadline = Deadline("the end", lambda: left[0], Durations(), lambda: False)
    assert deadline.requested() == 0
    for seconds, margin in ((100.0, 5.0), (50.0, 5.0)):
        left[0] = seconds
        assert deadline.requested() == 0
        assert deadline.margin_s == margin
    assert Deadline("the end", lambda: 1e6, Durations(), lambda: False).requested() == 0


def test_a_file_is_looked_for_once_a_second_and_obeyed_once(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "SAVE"
    file = FileRequest(path, SAVE, clock)
    assert file.requested() == 0
    path.touch()
    assert file.requested() == 0
    clock.now += 1.0
    assert file.requested() == SAVE
    file.on_done(SAVE)
    assert not path.exists()
    assert file.requested() == 0
    clock.now += 1.0
    assert file.requested() == 0


def test_a_stop_is_not_obeyed_by_a_save(tmp_path: Path) -> None:
    path = tmp_path / "STOP"
    path.touch()
    file = FileRequest(path, STOP, Clock())
    assert file.requested() == STOP
    file.on_done(SAVE)
    assert path.exists()
    assert file.requested() == STOP


def test_an_interval_counts_from_the_newest_checkpoint_whoever_asked_for_it() -> None:
    clock = Clock()
    interval = SaveInterval(600.0, clock)
    for _ in range(2):
        clock.now += 599.0
        assert interval.requested() == 0
        clock.now += 1.0
        assert interval.requested() == SAVE
        clock.now += 100.0
        interval.on_done(SAVE)


def test_the_first_cause_is_told_once_and_stays(tmp_path: Path) -> None:
    clock, said, stop = Clock(), list[str](), StopRequest()
    (tmp_path / "SAVE").touch()
    left = [1e6]
    asked = requests(
        SignalSource("SIGUSR1", stop),
        Deadline("run.time_limit=4h", lambda: left[0], Durations(), lambda: False, margin_s=0.0),
        FileRequest(tmp_path / "SAVE", SAVE, clock), said=said,
    )  # fmt: skip
    asked.start_vote()
    asked.finish_vote()
    assert (asked.stopped_by, asked.save_requested, said) == (None, True, [])
    asked.report_done(SAVE)
    left[0] = -1.0
    for _ in range(2):
        asked.start_vote()
        asked.finish_vote()
        assert (asked.stopped_by, asked.save_requested) == ("run.time_limit=4h", False)
        stop.requested = "SIGUSR1"
    assert said == ["run.time_limit=4h: stopping after this step"]


def test_a_measurement_for_which_no_time_is_left_ends_the_run(tmp_path: Path) -> None:
    asked = requests(Deadline("the end", lambda: 30.0, costs(Clock()), lambda: False, margin_s=4.0), said=[])
    asked.start_vote()
    asked.finish_vote()
    assert asked.lacks_time_for(EVALUATION)
    assert not asked.lacks_time_for(VALIDATION)
    assert not asked.stop_if_no_time_for(VALIDATION)
    assert asked.stop_if_no_time_for(EVALUATION)
    assert asked.stopped_by == "the end"


def test_a_stop_cuts_off_what_is_being_measured() -> None:
    stop = StopRequest()
    asked = requests(SignalSource("SIGTERM", stop))
    tokens = torch.zeros((1, 1), dtype=torch.int64)
    batches = asked.batches_until_stop(Batch(tokens, tokens) for _ in range(3))
    next(batches)
    stop.requested = "SIGTERM"
    with pytest.raises(MeasurementCutOff):
        next(batches)
    assert asked.stopped_by == "SIGTERM"


class Held(Memory):
    """A rank that holds so many bytes."""

    def __init__(self, num_bytes: int, rank: int) -> None:
        super().__init__("cpu", rank)
        self.num_bytes = num_bytes

    def measure(self) -> tuple[int, int]:
        return self.num_bytes, self._rank


def test_all_ranks_hear_which_of_them_is_fullest_and_nobody_is_asked_for_anything() -> None:
    clock = Clock()
    memories = [Held(3 << 30, 0), Held(5 << 30, 1), Held((5 << 30) - 4096, 2), Held(9 << 30, 70_000)]
    askers = [FullestMemory(memory, clock) for memory in memories]
    told = [asker.requested() for asker in askers]
    assert not any(number & (SAVE | STOP | sum(NO_TIME_FOR.values())) for number in told)
    for asker in askers[:3]:
        asker.receive_maximum(max(told[:3]))
    assert [memory.fullest() for memory in memories[:3]] == [(5 << 30, 1)] * 3
    askers[0].receive_maximum(max(told))
    assert memories[0].fullest() == (9 << 30, 70_000)
    memories[1].num_bytes = 6 << 30
    assert askers[1].requested() == told[1]  # not asked again within a second
    clock.now += 1
    assert askers[1].requested() > told[1]


def test_the_vote_of_one_process_carries_its_own_memory() -> None:
    memory = Held(2 << 20, 0)
    found = requests(FullestMemory(memory, Clock()))
    found.start_vote()
    found.finish_vote()
    memory.num_bytes = 1 << 20
    assert memory.fullest() == (2 << 20, 0)
    assert not found.save_requested
    assert found.stopped_by is None
