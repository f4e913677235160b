"""Stop requests: the first signal is noted, the second urgent one ends the process."""

from __future__ import annotations

import os
import signal

import pytest

from lmtrain.runtime.signals import StopRequest

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
    with pytest.raises(KeyboardInterrupt, match=f"{second.name} after {first.name}"), StopRequest(0.0):  # noqa: PT012
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), second)
    assert [signal.getsignal(n) for n in WATCHED] == before


def test_one_stop_that_arrives_twice_at_once_is_one() -> None:
    """Ctrl-C comes from the terminal and again from the launcher."""
    with StopRequest(repeat_after_s=1000.0) as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.requested == "SIGINT"


def test_an_early_warning_does_not_count_as_the_first_urgent_one() -> None:
    with StopRequest(0.0) as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested == "SIGUSR2"
