"""A command is never silent for long, and answers Ctrl-C within a second also in a call that does not return."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from lmtrain.runtime.processes import command_watch
from lmtrain.runtime.processes.command_watch import (
    ANSWER_WITHIN_S,
    InterruptClock,
    SilenceClock,
    answer_interrupt,
    end_watch,
    note_output,
    raise_interrupt,
    watch_command,
)
from lmtrain.runtime.processes.stop_signals import StopRequest


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def fds() -> Iterator[list[str]]:
    before = os.listdir("/proc/self/fd")
    yield before
    assert sorted(os.listdir("/proc/self/fd")) == sorted(before)


def no_end(code: int) -> None:
    pytest.fail("the process would have ended")


def lines_within(clock: Clock, silence: SilenceClock, seconds: float) -> list[float]:
    """When a command that stays silent prints a line, in seconds since it began."""
    began, lines = clock.now_s, list[float]()
    while (due := clock.now_s + silence.wait_s()) <= began + seconds:
        clock.now_s = due
        silence.note_output()
        lines.append(due - began)
    return lines


def test_the_first_line_comes_after_5_seconds_and_a_minute_is_the_longest_silence() -> None:
    clock = Clock()
    lines = lines_within(clock, SilenceClock(clock), 86400.0)
    assert lines[:3] == [5.0, 10.0, 15.0]
    gaps = [round(later - earlier, 6) for earlier, later in pairwise(lines)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 60.0
    assert len(lines) < 1600


def test_another_part_of_a_long_command_begins_with_short_silences() -> None:
    clock = Clock()
    silence = SilenceClock(clock)
    lines_within(clock, silence, 7200.0)
    assert silence.wait_s() > 50.0
    silence.begin_part()
    silence.note_output()
    assert silence.wait_s() == 5.0


def test_output_postpones_the_next_line() -> None:
    clock = Clock()
    silence = SilenceClock(clock)
    clock.now_s += 4.0
    silence.note_output()
    assert silence.wait_s() == 5.0


def test_an_answer_is_due_within_a_second() -> None:
    clock = Clock()
    interrupt = InterruptClock(clock)
    assert interrupt.wait_s() == float("inf")
    interrupt.signal_came()
    assert interrupt.wait_s() == pytest.approx(ANSWER_WITHIN_S)
    assert ANSWER_WITHIN_S < 1.0
    interrupt.answered()
    assert interrupt.wait_s() == float("inf")


def test_a_call_that_does_not_return_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    codes = list[int]()
    answer_interrupt(was_received=False, end=codes.append)
    assert codes == [130]
    assert "same command begins anew or goes on" in capfd.readouterr().err


def test_a_slow_clean_up_is_announced(capfd: pytest.CaptureFixture[str]) -> None:
    answer_interrupt(was_received=True, end=no_end)
    assert "Ctrl-C: stopping" in capfd.readouterr().err


def test_a_run_in_a_long_call_says_that_it_will_stop_and_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    told = list[str]()
    with StopRequest() as stop:
        answer_interrupt(was_received=False, end=no_end)
        assert "warning: SIGINT: stopping as soon as" in capfd.readouterr().err
        assert stop.requested is None
    with StopRequest() as stop:
        stop.defer_to_step_end(told.append)
        answer_interrupt(was_received=False, end=no_end)
        os.kill(os.getpid(), signal.SIGINT)  # the handler is called when the long call has returned
        assert stop.requested == "SIGINT"
    assert told == ["SIGINT"]


def test_the_thread_sees_ctrl_c_while_the_main_thread_is_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread blocks the signal here, as a call that does not return does for Python's handlers."""
    answered = threading.Event()
    received = list[bool]()

    def answer(*, was_received: bool) -> None:
        received.append(was_received)
        answered.set()

    monkeypatch.setattr(command_watch, "answer_interrupt", answer)
    monkeypatch.setattr(command_watch, "ANSWER_WITHIN_S", 0.0)
    monkeypatch.setattr(command_watch, "raise_interrupt", lambda number, frame: None)
    with watch_command(None):
        os.kill(os.getpid(), signal.SIGINT)
        assert answered.wait(10)
    assert received == [False]


def test_ctrl_c_raises_in_the_main_thread_and_all_is_as_before(fds: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt), watch_command(None):  # noqa: PT012
        assert signal.getsignal(signal.SIGINT) is raise_interrupt
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1


def test_a_process_that_ignores_ctrl_c_keeps_ignoring_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with watch_command(None):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            answer_interrupt(was_received=False, end=no_end)
    finally:
        signal.signal(signal.SIGINT, before)


def test_before_a_fork_there_is_one_thread(fds: list[str]) -> None:
    num_threads = threading.active_count()
    with watch_command(None):
        assert threading.active_count() == num_threads + 1
        end_watch()
        assert threading.active_count() == num_threads
        note_output()
