"""Turn stop signals into a stop at the right place, from the first moment of a run to its last.

SIGTERM and SIGINT come from people and schedulers, SIGUSR1 and SIGUSR2 from a scheduler's early warning. Each of them
requests a stop. Until the settings are known it is only recorded; from then to the end of the first step it raises
`Stopped` in the main thread, since there is nothing to save yet; later the training loop checks for it after every
step: it saves, and the run ends with stop.json and exit code 75. A second SIGTERM or SIGINT raises in any case, and a
third one ends the process by the signal's default action.
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

from lmtrain.runtime.processes.command_watch import announce_stops_by, note_interrupt_received
from lmtrain.runtime.terminal_safe_text import warn

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_URGENT_STOPS = (signal.SIGTERM, signal.SIGINT)
STOP_NAMES = tuple(number.name for number in STOPS)


class Stopped(BaseException):
    """Raised to end this process on a stop signal, without a checkpoint of its own.

    because: not an Exception, which a library might catch as a failure of its own.
    """


class StopRequest:
    """Handles stop signals within its `with` block; `requested` is the name of the first one that came, or None.

    Only the main thread may enter the block.
    """

    def __init__(self, repeat_after_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Signals within `repeat_after_s` of the last one that counted are taken for the same."""
        # because: one Ctrl-C reaches a process twice, from the terminal and forwarded by its launcher
        self._repeat_after_s, self._clock = repeat_after_s, clock
        self._urgent_since: float | None = None
        self._num_urgent = 0
        self._raises = self._is_deferred = self._woken = self._raised = self._is_announced = False
        self.rendezvous_started = False  # whether this process has begun to wait for its peers
        self._stop_event = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}
        self.began_s = clock()
        self.requested: str | None = None  # the first signal's name
        # called with that name within the signal handler: it may only set a variable or write unbuffered output
        self.on_request: Callable[[str], None] | None = None  # None while a stop ends this process at once

    def __enter__(self) -> StopRequest:
        for number in STOPS:
            self._previous[number] = signal.signal(number, self._receive)
        unblock_stops()  # because: a launcher may have blocked them until now
        announce_stops_by(self.announce)
        return self

    def __exit__(self, *_: object) -> None:
        announce_stops_by(None)
        for number, handler in self._previous.items():
            # because: None stands for a handler that was not set by Python and cannot be restored
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    @property
    def ends_at_once(self) -> bool:
        """True if this process is to end without a checkpoint of its own."""
        return self._raises and self.requested is not None

    @property
    def cause(self) -> str:
        """The signal as a message names it, with a note if a second one came."""
        return f"{self.requested}{', and a second signal' * (self._num_urgent > 1)}"

    def raise_at_once(self) -> None:
        """Raise `Stopped` at once on a stop from now on, also on one that was received before."""
        self._raises = True
        self.raise_if_due()

    def defer_to_step_end(self, on_request: Callable[[str], None]) -> None:
        """Defer stops to the end of the step from now on; `on_request` is called at once with the signal's name."""
        self._raises = self._num_urgent > 1 or self._stop_event.is_set()
        self.on_request = on_request

    def raise_if_due(self) -> None:
        """Raise `Stopped` if this process must end at once because of a stop signal. Do nothing while stops are
        deferred or torch is being imported. It is also called between the phases of start-up.

        because: an exception raised by a signal handler can be lost in a library's callback
        """
        # because: torch's C++ calls Python while it is imported; an exception raised there ends the process by SIGABRT
        spec = getattr(sys.modules.get("torch"), "__spec__", None)
        if self.ends_at_once and not self._is_deferred and not getattr(spec, "_initializing", False):
            self._raised = True
            raise Stopped(self.requested)

    def defer(self) -> None:
        """Only record stops until `report_stop`: the rendezvous begins, and peers would wait for a rank that left."""
        self._is_deferred = self.rendezvous_started = True

    @contextmanager
    def report_stop(self, send: Callable[[str], None]) -> Iterator[None]:
        """Let stop signals end this process from now on, instead of deferring them, and run the `with` block. If
        `Stopped` is raised at its beginning or in it, call `send` with the signal's name, so that the peers stop too,
        and raise it again. `send` must not wait for the peers.
        """
        try:
            self._is_deferred = False
            self.raise_if_due()
            yield
        except Stopped as stopped:
            send(str(stopped))
            raise

    def stop_with_peer(self, name: str) -> None:
        """Stop this process at once because a peer got the stop signal `name` and leaves. It can be called from any
        thread.
        """
        self.requested = self.requested or name
        self._raises = self._woken = True
        self._stop_event.set()
        # because: this wakes the main thread out of most of what it may be waiting for
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def wait_for_stop(self, wait_s: float) -> bool:
        """Return whether a stop signal, of this process or a peer, requires this process to end at once. If none does
        yet, first wait up to `wait_s` for a peer's message about one. It is called when a peer seems to be lost.
        """
        if not self.ends_at_once:
            self._stop_event.wait(wait_s)
        return self.ends_at_once

    def announce(self, name: str) -> None:
        """Tell the user of the stop signal `name`, which the main thread has not received within a second, as it is in
        a long call. Called from another thread.
        """
        if self.requested is None and not self._is_announced:
            self._is_announced = True
            if self.on_request is None:
                warn(f"{name}: stopping as soon as the computation that is under way ends")
            else:
                self.on_request(name)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Handle the stop signal `number`: record the first, raise `Stopped` if this process must end at once, and let
        the third SIGTERM or SIGINT end the process.
        """
        note_interrupt_received()
        name = signal.Signals(number).name
        is_first, was_woken, self._woken = self.requested is None, self._woken, False
        if is_first:
            self.requested = name
            if self.on_request is not None and not self._is_announced:
                self.on_request(name)
        is_repeat = number in _URGENT_STOPS and self._count_if_new() and self._num_urgent > 1
        if is_repeat and self._num_urgent > 2:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._raises = self._raises or is_repeat
        # because: a process that is already leaving must not be interrupted
        if is_first or is_repeat or (was_woken and not self._raised):
            self.raise_if_due()

    def _count_if_new(self) -> bool:
        """Count a SIGTERM or SIGINT that has come now, and return True. If it came within `repeat_after_s` of the last
        one counted, it is the same signal delivered twice: do not count it, and return False.
        """
        now_s = self._clock()
        if self._urgent_since is not None and now_s - self._urgent_since < self._repeat_after_s:
            return False
        self._urgent_since = now_s
        self._num_urgent += 1
        return True


_active_request: StopRequest | None = None  # this process's only one, set before the command line is read


def install_stop_handlers() -> None:
    """Record stop signals from now on, until `stop_requests` takes over. Called before any slow import."""
    global _active_request
    _active_request = StopRequest().__enter__()


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Handle this process's stop signals during the `with` block, which is a whole run. Yield the StopRequest that
    records them, including a signal that has come since `install_stop_handlers`.
    """
    global _active_request
    early, stop = _active_request is not None, _active_request or StopRequest().__enter__()
    _active_request = stop
    try:
        yield stop
    finally:
        _active_request = None
        if early:
            ignore_stops()
        else:
            stop.__exit__()


def restore_default_handlers() -> None:
    """Give stop signals their default effect again, in a command that is not a run. If one was recorded since
    `install_stop_handlers`, send it to this process again.
    """
    global _active_request
    if _active_request is not None:
        stop, _active_request = _active_request, None
        stop.__exit__()
        if stop.requested:
            os.kill(os.getpid(), signal.Signals[stop.requested])


def received_stop() -> str | None:
    """Return the name of the stop signal that this run has received, or None."""
    return _active_request.requested if _active_request is not None else None


def ignore_stops() -> None:
    """Ignore stop signals from here on, since this process ends with a result that no signal should change."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def blocked_stops() -> Iterator[None]:
    """Block stop signals during the `with` block. A process that is started in it keeps them blocked until it calls
    `unblock_stops`, and then receives those that came meanwhile.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_stops() -> None:
    """Receive stop signals from here on; a process that `blocked_stops` started was shielded from them."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
