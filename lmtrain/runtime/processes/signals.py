"""Turns "please stop" signals into a stop at the right place, from the first moment of a run to its last.

SIGTERM and SIGINT come from people and schedulers, SIGUSR1 and SIGUSR2 from a scheduler's early warning. Any of them
asks for a stop. Until the settings are known it is noted; from then to the end of the first step it raises `Stopped`
in the main thread, since there is nothing to save yet; later it is a question that the training loop asks after every
step: it saves, and the attempt ends with stop.json and exit code 75. A second SIGTERM or SIGINT raises in any case, and
a third one ends the process by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_URGENT = (signal.SIGTERM, signal.SIGINT)
NAMES = tuple(number.name for number in STOPS)


class Stopped(BaseException):
    """This process was asked to stop, and ends without a checkpoint of its own.

    because: no Exception, which a library may take for a failure of its own and survive.
    """


class StopRequest:
    """`with StopRequest() as stop:` and then ask `stop.requested`. Only the main thread may enter it."""

    def __init__(self, repeat_after_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        # because: one Ctrl-C reaches a process twice, from the terminal and forwarded by its launcher
        self._repeat_after_s, self._clock = repeat_after_s, clock
        self._urgent_since: float | None = None
        self._num_urgent = 0
        self._raises = self._held = self._woken = self._raised = False
        self.meets = False  # whether this process has gone to meet its peers
        self._word = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}
        self.began_s = clock()
        self.requested: str | None = None  # the first signal's name
        # gets that name at once, wherever the signal came: it may only set a word, or write one that is not buffered
        self.heard: Callable[[str], None] = lambda name: None

    def __enter__(self) -> StopRequest:
        for number in STOPS:
            self._previous[number] = signal.signal(number, self._receive)
        unblock_stops()  # because: a launcher may keep them back until now
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # because: None stands for a handler that was not set by Python and cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    @property
    def ends_at_once(self) -> bool:
        """Whether this process is to end without a checkpoint of its own."""
        return self._raises and self.requested is not None

    @property
    def cause(self) -> str:
        """In words, of an end at once."""
        return f"{self.requested}{', and a second signal' * (self._num_urgent > 1)}"

    def at_once(self) -> None:
        """From here on a stop raises, and so does one that was noted before."""
        self._raises = True
        self.look()

    def politely(self, heard: Callable[[str], None]) -> None:
        """From here on a stop waits for the end of a step."""
        self._raises = self._num_urgent > 1 or self._word.is_set()
        self.heard = heard

    def look(self) -> None:
        """Call it at the borders of start-up, since what a signal raises can be lost in a library's callback."""
        # because: torch's C++ calls Python while it sets itself up; what is raised there ends the process by SIGABRT
        spec = getattr(sys.modules.get("torch"), "__spec__", None)
        if self.ends_at_once and not self._held and not getattr(spec, "_initializing", False):
            self._raised = True
            raise Stopped(self.requested)

    def hold(self) -> None:
        """Until `told_by` a stop is noted: the processes are meeting, and who went would be waited for."""
        self._held = self.meets = True

    @contextmanager
    def told_by(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Who leaves within says so to its peers by `tell`, which is not to wait for them."""
        try:
            self._held = False
            self.look()
            yield
        except Stopped as stopped:
            tell(str(stopped))
            raise

    def hear(self, name: str) -> None:
        """A peer was told to stop, and leaves at once; so does this process. May be called from any thread."""
        self.requested = self.requested or name
        self._raises = self._woken = True
        self._word.set()
        # because: this wakes the main thread out of most of what it may be waiting for
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def was_told(self, wait_s: float) -> bool:
        """Whether a peer that is lost has left because of a stop; its word may come a moment after it went."""
        if not self.ends_at_once:
            self._word.wait(wait_s)
        return self.ends_at_once

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        first, woken, self._woken = self.requested is None, self._woken, False
        if first:
            self.requested = name
            self.heard(name)
        again = number in _URGENT and self._is_new() and self._num_urgent > 1
        if again and self._num_urgent > 2:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._raises = self._raises or again
        if first or again or (woken and not self._raised):  # because: who is leaving by now is not to be interrupted
            self.look()

    def _is_new(self) -> bool:
        now = self._clock()
        if self._urgent_since is not None and now - self._urgent_since < self._repeat_after_s:
            return False
        self._urgent_since = now
        self._num_urgent += 1
        return True


_listener: StopRequest | None = None  # of this process, set before the command line is read


def listen() -> None:
    """Note stops from now on, until `listening` takes over. Called before anything that takes time is imported."""
    global _listener
    _listener = StopRequest().__enter__()


@contextmanager
def listening() -> Iterator[StopRequest]:
    """What this process was and is asked; for the whole of a run."""
    global _listener
    early, stop = _listener is not None, _listener or StopRequest().__enter__()
    _listener = stop
    try:
        yield stop
    finally:
        _listener = None
        if early:
            ignore_stops()
        else:
            stop.__exit__()


def give_back() -> None:
    """What follows is no run: signals do what they do to any program, also those that came by now."""
    global _listener
    if _listener is not None:
        stop, _listener = _listener, None
        stop.__exit__()
        if stop.requested:
            os.kill(os.getpid(), signal.Signals[stop.requested])


def asked_to_stop() -> str | None:
    """The name of the signal, where this process is a run and was asked."""
    return _listener.requested if _listener is not None else None


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
