"""Progress of a command other than training: a live line on a terminal, elsewhere a plain line every few seconds.

A report only stores numbers; a thread decides when they are shown. So lines come at even intervals however the work
goes, and also while nothing reports. Used by the commands; depends on none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event, Thread
from time import monotonic

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lmtrain.observe.screen.row_text import ticking
from lmtrain.units import format_bytes, format_count, plural

EVERY_S = 5.0  # seconds between two plain lines
_MOST_S = 60.0
_SHARE = 0.05  # because: a line every 5 s for a day makes a log too long to read
_LEAST_BAR = 8


def drawn(done: float, total: float, width: int) -> ProgressBar:
    """Return a progress bar whose two parts differ on dark and on light terminals."""
    return ProgressBar(
        total=total, completed=done, width=width, style="grey58", complete_style="bold cyan", finished_style="green"
    )


def is_live(console: Console) -> bool:
    """Return True if printed output can be redrawn in place."""
    return console.is_interactive and not console.is_dumb_terminal and console.file.isatty()


@dataclass(frozen=True)
class _State:
    """The last report; replaced whole, because the drawing thread reads it while reports come in."""

    doing: str
    began_s: float  # clock time at which the current activity began
    at_s: float  # clock time of the report
    done: int = 0
    total: int = 0  # 0 if unknown
    earlier: int = 0  # part of `done` that existed before this activity began
    speed: str = ""


class Reporter:
    """Callable that receives progress reports and formats them.

    `unit` is "bytes", or the plural of the things counted, such as "documents".
    """

    def __init__(self, doing: str, unit: str = "", clock: Callable[[], float] = monotonic) -> None:
        self._unit, self._clock = unit, clock
        self.began_s = now = clock()
        self._state = _State(doing, now, now)

    def __call__(self, done: int, total: int = 0, earlier: int = 0, speed: str = "") -> None:
        """Report progress; `speed` is a text that replaces the default, units per second."""
        now, state = self._clock(), self._state
        if done == earlier or done < state.done or (state.total and total != state.total):
            state = replace(state, began_s=now)  # because: the count was reset, so the next part of the work begins
        self._state = replace(state, at_s=now, done=done, total=total, earlier=earlier, speed=speed)

    def doing(self, what: str) -> None:
        """Set a new activity, with its count at zero."""
        if what != self._state.doing:
            now = self._clock()
            self._state = _State(what, now, now)

    def words(self) -> str:
        state, now = self._state, self._clock()
        made, seconds = state.done - state.earlier, max(state.at_s - state.began_s, 1e-9)
        parts = []
        if state.done:
            parts.append(self._of(state.done, state.total))
        if made > 0 and seconds > 0.1:
            short = format_bytes if self._unit == "bytes" else format_count
            parts.append(state.speed or f"{short(made / seconds)}/s")
        parts.append(f"{ticking(now - self.began_s)} elapsed")
        if state.total and made > 0:
            left = seconds * (state.total - state.done) / made - (now - state.at_s)
            parts += [f"{ticking(left)} left"] * (left >= 0.5)  # because: "0s left" is no information
        return f"{state.doing} {', '.join(parts)}"

    def _of(self, done: int, total: int) -> str:
        """Return "12.3 of 45.6 MiB"; a unit shared by both amounts appears once."""
        if not total:
            return self._amount(done)
        if self._unit != "bytes":
            return f"{format_count(done)} of {self._amount(total)}"
        number, _, unit = self._amount(done).partition(" ")
        whole = self._amount(total)
        return f"{number} of {whole}" if whole.endswith(f" {unit}") else f"{number} {unit} of {whole}"

    def _amount(self, value: float) -> str:
        if self._unit == "bytes":
            return format_bytes(value)
        return plural(value, self._unit.removesuffix("s"), format_count(value)) if self._unit else format_count(value)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state, line = self._state, Table.grid(padding=(0, 1, 0, 0))
        words = Text(self.words(), overflow="ellipsis", no_wrap=True)
        room = options.max_width - words.cell_len - 2
        bar = drawn(state.done, state.total, min(room, 40))
        line.add_row(words, *([bar] if state.total and room >= _LEAST_BAR else []))
        yield line


@contextmanager
def progress(
    console: Console, doing: str, unit: str = "", *, stopped: str = "", every_s: float = EVERY_S
) -> Iterator[Reporter]:
    """Show the progress of the enclosed work. `stopped` is printed after Ctrl-C: what exists now, and how to go on."""
    shown = Reporter(doing, unit)
    try:
        if is_live(console):
            with Live(shown, console=console, refresh_per_second=4, transient=True):
                yield shown
        else:
            with _told(shown, console, every_s):
                yield shown
    except KeyboardInterrupt:
        if stopped:
            console.print(f"stopped: {stopped}", markup=False, highlight=False, soft_wrap=True)
        raise


@contextmanager
def _told(shown: Reporter, console: Console, every_s: float) -> Iterator[None]:
    ended = Event()

    def tell() -> None:
        began, wait_s = monotonic(), every_s
        while not ended.wait(wait_s):
            console.print(shown.words(), markup=False, highlight=False, soft_wrap=True)
            wait_s = max(every_s, min(_SHARE * (monotonic() - began), _MOST_S))

    thread = Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
