"""The output of a training run: a live panel on a terminal, plain lines elsewhere.

The training loop passes the rows of metrics.jsonl. The view decides nothing, and never raises for a row that lacks a
figure. Every line also goes to the run folder's log.txt. metrics_row_text.py makes the texts, live_panel.py the panel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from types import MappingProxyType, TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lmtrain.observe.metrics import GrowingFile
from lmtrain.observe.screen.command_progress import is_live
from lmtrain.observe.screen.live_panel import FIRST_STEP, RunPanel, SaveSchedule
from lmtrain.observe.screen.metrics_row_text import Row, eval_line, format_clock, step_line, valid_line
from lmtrain.observe.screen.print_one_line import print_line
from lmtrain.runtime.processes.command_watch import begin_part, watch_command
from lmtrain.runtime.terminal_safe_text import plain_text, warn


class RunLog:
    """Writer of the run folder's log.txt."""

    def __init__(self, path: Path, clock: Callable[[], datetime] = partial(datetime.now, UTC)) -> None:
        self._clock = clock
        self._file = GrowingFile(path, "lines")
        if self._file.last_line():  # because: a kill or a full disk can have left half a line
            self._file.append(b"\n")

    def write(self, text: str) -> None:
        """Append `text` to the log with a time stamp in UTC. Further lines of the text are indented below the first."""
        num_lost = self._file.num_lost
        lost_note = f"{num_lost} lines are missing here, which could not be written\n" if num_lost else ""
        stamp = self._clock().strftime("%Y-%m-%dT%H:%M:%SZ")
        lines = plain_text(lost_note + text).rstrip().replace("\n", "\n" + " " * (len(stamp) + 2))
        self._file.append(f"{stamp}  {lines}\n".encode())

    def warn(self, text: str) -> None:
        """Write a warning to standard error and to the log."""
        warn(text)
        self.write(f"warning: {text}")

    def close(self) -> None:
        self._file.close()


def build_view(
    console: Console, title_facts: Mapping[str, str], total_steps: int, *, log: RunLog | None = None,
    saves: SaveSchedule | None = None, stages: Mapping[str, int] = MappingProxyType({}),
    start: Row = MappingProxyType({}),
) -> RunView:  # fmt: skip
    """Return a view that shows a training run on `console`: a live panel on a terminal, plain lines elsewhere, each
    line also written to `log`. `title_facts["run"]` is the title, the other facts are listed below it. `saves` has the
    intervals between checkpoints, `stages` the last step of each training stage by name, and `start` the step and the
    stage at which the view begins.
    """
    if not is_live(console):
        return RunView(console, title_facts, total_steps, log)
    return LiveView(console, title_facts, total_steps, log, saves, stages, start)


class RunView:
    """Plain-line view for a log file, a pipe or a batch job. A context manager, like the live view."""

    def __init__(
        self, console: Console, title_facts: Mapping[str, str], total_steps: int, log: RunLog | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        self.console, self.facts, self.total_steps, self._log = console, dict(title_facts), total_steps, log
        self._clock, self._since_s, self._activity, self._in_silence = clock, clock(), FIRST_STEP, ExitStack()

    def __enter__(self) -> Self:
        self._in_silence.enter_context(watch_command(self._print_activity))
        self._line("  ".join(f"{name} {value}" for name, value in self.facts.items()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._in_silence.close()

    def show_row(self, row: Row) -> None:
        """Show a step, validation or evaluation row of metrics.jsonl; rows of other events have no line."""
        self._activity, self._since_s = "", self._clock()
        match row["event"]:
            case "step":
                self._line(step_line(row, self.total_steps))
            case "valid":
                self._line(valid_line(row))
            case "eval":
                self._line(eval_line(row))

    def show_note(self, text: str) -> None:
        self._line(text)

    def show_activity(self, text: str) -> None:
        """Show the current activity of the run while no rows come: a plain line after some seconds of silence."""
        if not self._activity:
            self._since_s = self._clock()
            begin_part()
        self._activity = text

    def show_stop(self, text: str) -> None:
        """Show a stop request; called from a signal handler, at any point."""
        self._show(text)

    def _print_activity(self) -> None:
        """Print what the run is doing and for how long, because nothing was printed for a while."""
        seconds = format_clock(self._clock() - self._since_s)
        print_line(self.console, f"{self._activity or 'training'}, {seconds} so far")

    def _line(self, text: str) -> None:
        if self._log is not None:
            self._log.write(text)
        self._show(text)

    def _show(self, text: str) -> None:
        print_line(self.console, text)


class LiveView(RunView):
    """Live panel that rich's own thread redraws a few times a second; rows only replace the panel's data."""

    def __init__(
        self, console: Console, title_facts: Mapping[str, str], total_steps: int, log: RunLog | None = None,
        saves: SaveSchedule | None = None, stages: Mapping[str, int] = MappingProxyType({}),
        start: Row = MappingProxyType({}),
    ) -> None:  # fmt: skip
        super().__init__(console, title_facts, total_steps, log)
        self.panel = RunPanel(self.facts, total_steps, saves=saves, stages=stages, start=start)
        self._live = Live(self.panel, console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        super().__enter__()
        self._in_silence.enter_context(watch_command(None))  # because: the panel is drawn all the time
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        self.panel.freeze()
        with suppress(OSError):
            self._live.stop()

    def show_row(self, row: Row) -> None:
        self.panel.show_row(row)
        super().show_row(row)

    def show_note(self, text: str) -> None:
        super().show_note(text)
        with suppress(OSError):  # because: the terminal can disappear while its run goes on
            self.console.print(Text(plain_text(text), overflow="fold"))

    def show_activity(self, text: str) -> None:
        super().show_activity(text)
        self.panel.activity = text

    show_stop = show_activity  # because: the panel is drawn by another thread

    def _show(self, text: str) -> None:
        pass  # the panel shows rows; only notes are printed above it
