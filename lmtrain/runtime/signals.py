"""Turns "please stop" signals into a question that the training loop asks after every step.

SIGTERM and SIGINT come from people and schedulers, SIGUSR1 and SIGUSR2 from a scheduler's early warning. The first
asks for a stop with a checkpoint; a second SIGTERM or SIGINT ends the process at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_URGENT = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """`with StopRequest() as stop:` and then ask `stop.requested`. Only the main thread may enter it."""

    def __init__(self, repeat_after_s: float = 1.0, heard: Callable[[str], None] = lambda name: None) -> None:
        """`heard` gets the first signal's name at once; it runs wherever the signal came, so it may
        only set a word, or write one that is not buffered."""
        # because: one Ctrl-C reaches a process twice, from the terminal and forwarded by its launcher
        self._repeat_after_s = repeat_after_s
        self._urgent_since: float | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self.requested: str | None = None  # the first signal's name
        self._heard = heard

    def __enter__(self) -> StopRequest:
        for number in STOPS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # because: None stands for a handler that was not set by Python and cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is None:
            self.requested = name
            self._heard(name)
        if number not in _URGENT:
            return
        now = time.monotonic()
        if self._urgent_since is None:
            self._urgent_since = now
        elif now - self._urgent_since >= self._repeat_after_s:
            raise KeyboardInterrupt(f"{name} after {self.requested}: stopping without a checkpoint")


def ignore_stops() -> None:
    """From here on this process is ending with a result of its own, and no signal should give it another."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def blocked_stops() -> Iterator[None]:
    """What this thread starts in here begins with these signals waiting until it calls `unblock_stops`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_stops() -> None:
    """From here on this process hears them, as it does from its start where no launcher of ours has started it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
