"""Progress of a command other than training: a live line on a terminal, elsewhere a plain line every few seconds.

A report only stores numbers; a thread decides when they are shown. So lines come at even intervals however the work
goes, and also while nothing reports: the thread is that of runtime/processes/command_watch.py, which stands beside
every command. Used by the commands; depends on none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from time import monotonic

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lmtrain.observe.screen.metrics_row_text import format_clock
from lmtrain.runtime.processes.command_watch import note_output, watch_command
from lmtrain.units import format_bytes, format_count, plural

_MIN_BAR = 8


def progress_bar(done: float, total: float, width: int) -> ProgressBar:
    """Return a bar, `width` characters wide, that is filled up to `done` of `total`; its colours differ on dark and on
    light terminals.
    """
    return ProgressBar(
        total=total, completed=done, width=width, style="grey58", complete_style="bold cyan", finished_style="green"
    )


def is_live(console: Console) -> bool:
    """Return True if printed output can be redrawn in place."""
    return console.is_interactive and not console.is_dumb_terminal and console.file.isatty()


@dataclass(frozen=True)
class _State:
    """The last report; replaced whole, because the drawing thread reads it while reports come in."""

    activity: str
    began_s: float  # clock time at which the current activity began
    at_s: float  # clock time of the report
    done: int = 0
    total: int = 0  # 0 if unknown
    earlier: int = 0  # part of `done` that existed before this activity began
    speed: str = ""


class ProgressReporter:
    """Callable that receives progress reports and formats them.

    `unit` is "bytes", or the plural of the things counted, such as "documents".
    """

    def __init__(self, activity: str, unit: str = "", clock: Callable[[], float] = monotonic) -> None:
        self._unit, self._clock = unit, clock
        self.began_s = now = clock()
        self._state = _State(activity, now, now)

    def __call__(self, done: int, total: int = 0, earlier: int = 0, speed: str = "") -> None:
        """Report that `done` of `total` units are done (0: total unknown), of which `earlier` existed before this
        activity. `speed` is a text that replaces the default, units per second.
        """
        now, state = self._clock(), self._state
        if done == earlier or done < state.done or (state.total and total != state.total):
            state = replace(state, began_s=now)  # because: the count was reset, so the next part of the work begins
        self._state = replace(state, at_s=now, done=done, total=total, earlier=earlier, speed=speed)

    def set_activity(self, activity: str) -> None:
        """Show the text `activity` in front of the progress from now on, and restart the count at zero if the text is
        new.
        """
        if activity != self._state.activity:
            now = self._clock()
            self._state = _State(activity, now, now)

    def text(self) -> str:
        state, now = self._state, self._clock()
        num_new, seconds = state.done - state.earlier, max(state.at_s - state.began_s, 1e-9)
        parts = []
        if state.done:
            parts.append(self._amount_of_total(state.done, state.total))
        if num_new > 0 and seconds > 0.1:
            format_amount = format_bytes if self._unit == "bytes" else format_count
            parts.append(state.speed or f"{format_amount(num_new / seconds)}/s")
        parts.append(f"{format_clock(now - self.began_s)} elapsed")
        if state.total and num_new > 0:
            left_s = seconds * (state.total - state.done) / num_new - (now - state.at_s)
            parts += [f"{format_clock(left_s)} left"] * (left_s >= 0.5)  # because: "0s left" is no information
        return f"{state.activity} {', '.join(parts)}"

    def _amount_of_total(self, done: int, total: int) -> str:
        """Return the progress as text, such as "12.3 of 45.6 MiB", or only the amount done if `total` is 0. A unit that
        both amounts share appears once.
        """
        if not total:
            return self._amount(done)
        if self._unit != "bytes":
            return f"{format_count(done)} of {self._amount(total)}"
        number, _, unit = self._amount(done).partition(" ")
        total_text = self._amount(total)
        return f"{number} of {total_text}" if total_text.endswith(f" {unit}") else f"{number} {unit} of {total_text}"

    def _amount(self, value: float) -> str:
        if self._unit == "bytes":
            return format_bytes(value)
        return plural(value, self._unit.removesuffix("s"), format_count(value)) if self._unit else format_count(value)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state, line = self._state, Table.grid(padding=(0, 1, 0, 0))
        text = Text(self.text(), overflow="ellipsis", no_wrap=True)
        width_left = options.max_width - text.cell_len - 2
        bar = progress_bar(state.done, state.total, min(width_left, 40))
        line.add_row(text, *([bar] if state.total and width_left >= _MIN_BAR else []))
        yield line


# shows the progress of a block: called with the activity, the unit, and the note after Ctrl-C, as `progress` has them
ShowProgress = Callable[[str, str, str], AbstractContextManager[ProgressReporter]]


@contextmanager
def progress(console: Console, activity: str, unit: str = "", *, stop_note: str = "") -> Iterator[ProgressReporter]:
    """Show the progress of the enclosed block on `console`, as "ACTIVITY 12.3 of 45.6 MiB, ...": a live line, or a
    plain line after each few seconds in which nothing is printed. The block passes its counts of `unit` to the yielded
    reporter. `stop_note` is printed after Ctrl-C.

    `unit` is "bytes" or a plural such as "documents". `stop_note` tells the user what exists now, and how to continue.
    """
    reporter = ProgressReporter(activity, unit)
    try:
        if is_live(console):
            with watch_command(None), Live(reporter, console=console, refresh_per_second=4, transient=True):
                yield reporter
        else:
            with watch_command(lambda: _print(console, reporter.text())):
                yield reporter
    except KeyboardInterrupt:
        if stop_note:
            _print(console, f"stopped: {stop_note}")
            note_output()
        raise


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
