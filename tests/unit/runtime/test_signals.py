"""Stop requests: the first signal is noted, the second urgent one ends the process."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from lmtrain.runtime.processes.stop_signals import (
    Stopped,
    StopRequest,
    install_stop_handlers,
    received_stop,
    restore_default_handlers,
    stop_requests,
)

WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@pytest.mark.parametrize("number", WATCHED)
def test_a_signal_is_noted_and_the_old_handlers_come_back(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in WATCHED]
    with StopRequest() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name
    assert [signal.getsignal(n) for n in WATCHED] == before


@pytest.mark.parametrize(("first", "second"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)])
def test_the_second_urgent_signal_ends_at_once(first: signal.Signals, second: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in WATCHED]
    with pytest.raises(Stopped, match=first.name), StopRequest(0.0) as stop:  # noqa: PT012
        os.kill(os.getpid(), first)
        assert not stop.ends_at_once
        os.kill(os.getpid(), second)
    assert stop.cause == f"{first.name}, and a second signal"
    assert [signal.getsignal(n) for n in WATCHED] == before


@pytest.mark.parametrize("number", WATCHED)
def test_before_the_first_step_every_signal_ends_at_once_and_once(number: signal.Signals) -> None:
    with StopRequest() as stop:
        stop.raise_at_once()
        with pytest.raises(Stopped, match=number.name):
            os.kill(os.getpid(), number)
        for again in WATCHED:  # while the process is ending
            os.kill(os.getpid(), again)
        assert stop.cause == number.name


def test_what_came_before_the_settings_were_known_ends_the_run_then() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(Stopped, match="SIGUSR1"):
            stop.raise_at_once()


def test_after_the_first_step_a_stop_is_polite_and_the_second_is_not() -> None:
    heard: list[str] = []
    with StopRequest(0.0) as stop:
        stop.raise_at_once()
        for _ in range(3):
            stop.defer_to_step_end(heard.append)
        os.kill(os.getpid(), signal.SIGINT)
        assert (heard, stop.requested, stop.ends_at_once) == (["SIGINT"], "SIGINT", False)
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGINT)
        stop.defer_to_step_end(heard.append)
        assert stop.ends_at_once


def test_while_processes_meet_a_stop_is_kept_and_then_told() -> None:
    told: list[str] = []
    with StopRequest() as stop:
        stop.raise_at_once()
        stop.defer()
        os.kill(os.getpid(), signal.SIGUSR2)
        stop.raise_if_due()
        with pytest.raises(Stopped), stop.report_stop(told.append):
            pytest.fail("it went on")
    assert told == ["SIGUSR2"]


def test_a_peer_that_leaves_takes_this_process_along() -> None:
    """Its word comes by another thread, and ends what the main thread waits in."""
    with StopRequest() as stop:
        stop.defer_to_step_end(lambda name: None)
        thread = threading.Thread(target=stop.stop_with_peer, args=("SIGTERM",))
        with pytest.raises(Stopped, match="SIGTERM"):  # noqa: PT012
            thread.start()
            threading.Event().wait(60.0)
        thread.join()
        assert stop.wait_for_stop(60.0)
        stop.defer_to_step_end(lambda name: None)
        assert stop.ends_at_once


def test_who_leaves_already_is_not_interrupted_by_a_peer() -> None:
    """What it was doing may be waiting for a thread to end, and a generator that is closed has no one to raise to."""
    with StopRequest() as stop:
        stop.raise_at_once()
        with pytest.raises(Stopped, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
        stop.stop_with_peer("SIGTERM")
        assert stop.wait_for_stop(0.0)


def test_a_loss_without_a_word_is_a_loss() -> None:
    stop = StopRequest()
    stop.raise_at_once()
    assert not stop.wait_for_stop(0.0)


def test_who_is_no_run_gets_its_signals_back() -> None:
    got: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        restore_default_handlers()
        install_stop_handlers()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (got, received_stop()) == ([], "SIGUSR1")
        restore_default_handlers()
        assert (got, received_stop()) == ([signal.SIGUSR1], None)
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_a_run_takes_over_what_was_heard_before_it() -> None:
    before = {number: signal.getsignal(number) for number in WATCHED}
    try:
        install_stop_handlers()
        os.kill(os.getpid(), signal.SIGTERM)
        with stop_requests() as stop:
            assert (stop.requested, received_stop()) == ("SIGTERM", "SIGTERM")
        assert {signal.getsignal(number) for number in WATCHED} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with stop_requests() as stop:
        assert stop.requested is None
    assert {number: signal.getsignal(number) for number in WATCHED} == before


def test_one_stop_that_arrives_twice_at_once_is_one() -> None:
    """Ctrl-C comes from the terminal and again from the launcher."""
    with StopRequest(repeat_after_s=1000.0) as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.requested == "SIGINT"


def test_who_presses_again_and_again_insists() -> None:
    """However quickly: what counts is the time since the first one that counted."""
    now = [0.0]
    with pytest.raises(Stopped), StopRequest(repeat_after_s=1.0, clock=lambda: now[0]) as stop:  # noqa: PT012
        for now[0] in (0.0, 0.6):
            os.kill(os.getpid(), signal.SIGINT)
        assert not stop.ends_at_once
        now[0] = 1.2
        os.kill(os.getpid(), signal.SIGINT)


def test_an_early_warning_does_not_count_as_the_first_urgent_one() -> None:
    with StopRequest(0.0) as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested == "SIGUSR2"


def test_while_torch_is_imported_a_stop_is_noted_and_looked_at_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is raised in Python that torch's own set-up calls would abort the process."""
    torch = ModuleType("torch")
    torch.__spec__ = ModuleSpec("torch", None)
    torch.__spec__._initializing = True  # type: ignore[attr-defined]  # because: as Python marks it
    monkeypatch.setitem(sys.modules, "torch", torch)
    with StopRequest() as stop:
        stop.raise_at_once()
        os.kill(os.getpid(), signal.SIGTERM)
        stop.raise_if_due()
        torch.__spec__._initializing = False  # type: ignore[attr-defined]
        with pytest.raises(Stopped, match="SIGTERM"):
            stop.raise_if_due()


def test_python_marks_a_module_that_is_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_way.py").write_text("import sys\nfound = sys.modules[__name__].__spec__._initializing\n")
    monkeypatch.syspath_prepend(tmp_path)
    half_way = importlib.import_module("half_way")
    assert half_way.found
    assert not getattr(half_way.__spec__, "_initializing", False)
