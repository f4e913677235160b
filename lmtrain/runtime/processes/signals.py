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
    """A stop of this process, which ends without a checkpoint of its own.

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
        """True if this process is to end without a checkpoint of its own."""
        return self._raises and self.requested is not None

    @property
    def cause(self) -> str:
        """Return the signal, and whether a second one came, in words."""
        return f"{self.requested}{', and a second signal' * (self._num_urgent > 1)}"

    def at_once(self) -> None:
        """Raise on a stop from here on, also on one that was received before."""
        self._raises = True
        self.look()

    def politely(self, heard: Callable[[str], None]) -> None:
        """Let a stop wait for the end of a step from here on, and report it to `heard`."""
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
        """Only record stops until `told_by`: the processes are meeting, and peers would wait for one that left."""
        self._held = self.meets = True

    @contextmanager
    def told_by(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Report a stop within the block to the peers by `tell`, which must not wait for them."""
        try:
            self._held = False
            self.look()
            yield
        except Stopped as stopped:
            tell(str(stopped))
            raise

    def hear(self, name: str) -> None:
        """Stop this process at once, because a peer was told to stop and leaves. May be called from any thread."""
        self.requested = self.requested or name
        self._raises = self._woken = True
        self._word.set()
        # because: this wakes the main thread out of most of what it may be waiting for
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def was_told(self, wait_s: float) -> bool:
        """Return whether a lost peer left because of a stop; wait `wait_s` for its message."""
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
    """Yield the stop requests that this process receives, earlier ones included, for the whole of a run."""
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
    """Restore the default handling of signals, for a command that is no run; deliver those received so far."""
    global _listener
    if _listener is not None:
        stop, _listener = _listener, None
        stop.__exit__()
        if stop.requested:
            os.kill(os.getpid(), signal.Signals[stop.requested])


def asked_to_stop() -> str | None:
    """Return the signal that asked this run to stop, or None."""
    return _listener.requested if _listener is not None else None


def ignore_stops() -> None:
    """Ignore stop signals from here on, since this process ends with a result that no signal should change."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def blocked_stops() -> Iterator[None]:
    """Block stop signals: a process started within begins with them pending until it calls `unblock_stops`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_stops() -> None:
    """Receive stop signals from here on; a process that `blocked_stops` started was shielded from them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
