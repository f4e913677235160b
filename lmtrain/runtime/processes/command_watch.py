"""The thread beside every command: it prints a line when the command has been silent for a while, and answers Ctrl-C.

The command line starts it around each verb (cli/subcommands.py), so that no verb has to think of it; a verb only says,
by `shown_by`, what its line is. Python runs the handler of Ctrl-C when the main thread returns from the call that it is
in, and a call into C++ or Rust can take minutes. This thread learns of the signal at once, and ends the process if the
call does not return in time: every command can be killed without harm. A training run is not ended but told of.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from types import FrameType

INTERVAL_S = 5.0  # seconds of silence before the first line
_MAX_INTERVAL_S = 60.0
_INTERVAL_SHARE = 0.05  # because: a line every 5 s for a day makes a log too long to read
ANSWER_WITHIN_S = 0.8  # after Ctrl-C, so that the answer comes within a second
_INTERRUPTED_CODE = 130  # as shells report a process that Ctrl-C has ended
_STOPPING = "Ctrl-C: stopping; what is under way ends first. Press it again to end that too."
_ENDED = "stopped in the middle of a long computation, as if killed: the same command begins anew or goes on."


class SilenceClock:
    """The time at which a silent command prints its next line: after 5 s, in a long command less often."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._began_s = self._printed_s = clock()

    def note_output(self) -> None:
        """Begin a new silence, because something was printed."""
        self._printed_s = self._clock()

    def begin_part(self) -> None:
        """Begin another part of the work, whose lines come at short intervals again."""
        self._began_s = self._clock()

    def wait_s(self) -> float:
        """Return the seconds until the next line is due, if nothing is printed before; 0 or less if it is due."""
        share_s = _INTERVAL_SHARE * (self._printed_s - self._began_s)
        return self._printed_s + max(INTERVAL_S, min(share_s, _MAX_INTERVAL_S)) - self._clock()


class InterruptClock:
    """A Ctrl-C that has come: whether the main thread has received it, and when an answer is due."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._came_s: float | None = None
        self.is_received = False  # True once a handler was called in the main thread

    def signal_came(self) -> None:
        self._came_s = self._clock()

    def wait_s(self) -> float:
        """Return the seconds until an answer is due, 0 or less if it is; infinity if no Ctrl-C waits for one."""
        return float("inf") if self._came_s is None else self._came_s + ANSWER_WITHIN_S - self._clock()

    def answered(self) -> None:
        self._came_s, self.is_received = None, False


class _Watch:
    """The thread beside this process's command, until `end`."""

    def __init__(self) -> None:
        self.silence, self.interrupt = SilenceClock(), InterruptClock()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._ended, self._fd_before = False, -1
        self._takes_signals = threading.current_thread() is threading.main_thread()
        if self._takes_signals:
            self._fd_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
            # because: a process that was started with Ctrl-C ignored keeps ignoring it, and a run has its own handler
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, raise_interrupt)
        self._thread = threading.Thread(target=self._run, name="command watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread, and give signals the handlers that they had."""
        self._ended = True
        if self._takes_signals:
            signal.set_wakeup_fd(self._fd_before)
            if signal.getsignal(signal.SIGINT) is raise_interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        self.wake()
        self._thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def wake(self) -> None:
        """Let the thread look again when its next line is due."""
        with suppress(BlockingIOError):  # because: with a full pipe it is about to look
            os.write(self._write_fd, b"\0")

    def _run(self) -> None:
        poll = select.poll()  # because: select takes no descriptor above 1023
        poll.register(self._read_fd, select.POLLIN)
        while not self._ended:
            wait_s = min(self.silence.wait_s(), self.interrupt.wait_s())
            if poll.poll(max(1000 * wait_s, 0)) and signal.SIGINT in os.read(self._read_fd, 4096):
                self.interrupt.signal_came()
            elif not self._ended:
                self._print_what_is_due()

    def _print_what_is_due(self) -> None:
        if self.interrupt.wait_s() <= 0:
            was_received = self.interrupt.is_received
            self.interrupt.answered()
            answer_interrupt(was_received=was_received)
        if self.silence.wait_s() <= 0:
            self.silence.note_output()
            if (print_line := _lines[-1]) is not None:
                with suppress(OSError, ValueError):  # because: a closed pipe is no reason to end a command
                    print_line()


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, the handler of Ctrl-C in a command that is not a run."""
    note_interrupt_received()
    signal.default_int_handler(number, frame)


def answer_interrupt(*, was_received: bool, end: Callable[[int], object] = os._exit) -> None:
    """Answer a Ctrl-C that has had no answer for almost a second. If the main thread has not even received it, it is in
    a call that does not return: call `end`, which ends the process, unless this is a training run.
    """
    if _announce is not None:
        if not was_received:
            _announce(signal.SIGINT.name)
    elif signal.getsignal(signal.SIGINT) not in (raise_interrupt, signal.default_int_handler):
        return
    elif was_received:
        _print(_STOPPING)
    else:
        _print(_ENDED)
        end(_INTERRUPTED_CODE)


_watch: _Watch | None = None
_lines: list[Callable[[], None] | None] = []  # the innermost last; None where a silence says nothing
_announce: Callable[[str], None] | None = None  # tells the user of a stop signal that was not received yet


@contextmanager
def watch_command(print_line: Callable[[], None] | None) -> Iterator[None]:
    """Context manager around a command: `print_line` is called from a thread after each 5 seconds of silence, less
    often in a long command, and Ctrl-C is answered within a second. Within another watched command it only replaces the
    line. With None a silence says nothing.
    """
    global _watch
    _lines.append(print_line)
    starts = _watch is None
    try:
        if starts:
            _watch = _Watch()
        begin_part()
        yield
    finally:
        if starts:
            end_watch()
        _lines.pop()


def end_watch() -> None:
    """End the thread beside this command, whose child processes answer and print from here on, or which forks."""
    global _watch
    if _watch is not None:
        watch, _watch = _watch, None
        watch.end()


def note_output() -> None:
    """Note that something was printed, so that the next line about progress is not due yet, and Ctrl-C is answered."""
    if _watch is not None:
        _watch.silence.note_output()
        if _watch.interrupt.is_received:
            _watch.interrupt.answered()


def begin_part() -> None:
    """Begin another part of the command's work: the first lines about it come at short intervals."""
    if _watch is not None:
        _watch.silence.begin_part()
        _watch.wake()


def note_interrupt_received() -> None:
    """Note that a handler of Ctrl-C was called in the main thread."""
    if _watch is not None:
        _watch.interrupt.is_received = True


def announce_stops_by(announce: Callable[[str], None] | None) -> None:
    """Call `announce` with the name of a stop signal that the main thread does not receive within a second; None ends
    that.
    """
    global _announce
    _announce = announce


def _print(text: str) -> None:
    with suppress(OSError):
        os.write(2 if sys.__stderr__ is None else sys.__stderr__.fileno(), f"\n{text}\n".encode())
