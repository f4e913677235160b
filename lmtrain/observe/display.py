"""What a person sees while a run trains: a live panel on a terminal, plain one-line logs everywhere else.

Called by the training loop with the rows of metrics.jsonl; decides nothing and never raises for a row that lacks a
figure. Every line also goes to the run folder's log.txt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import UnsupportedOperation
from time import monotonic
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lmtrain.observe.escaped import plain, wrapped
from lmtrain.observe.log import RunLog
from lmtrain.observe.progress import is_live
from lmtrain.observe.words import (
    Row,
    compute,
    eval_figures,
    eval_line,
    figures,
    smoothed,
    sparkline,
    step_line,
    ticking,
    valid_line,
)

_KEPT_LOSSES = 512
_TWO_COLUMNS = 70  # below this width the figures stand in one column


def build_view(
    console: Console, title_facts: Mapping[str, str], total_steps: int, *, log: RunLog | None = None
) -> RunView:
    """The view that suits this console. `title_facts["run"]` is the title; the other facts are listed below it."""
    return (LiveView if is_live(console) else RunView)(console, title_facts, total_steps, log)


def print_line(console: Console, text: str) -> None:
    """At once and as one piece, for a signal can come in the middle of another line. What nobody takes is lost.

    because: a full disk, or a reader that went away, is no reason to end a run, whose log has the line too.
    """
    text = plain(text)
    text = wrapped(text, console.width) if console.file.isatty() else text
    data = f"{text}\n".encode(console.encoding, "backslashreplace")
    if console.quiet:
        return
    try:
        number = console.file.fileno()
    except UnsupportedOperation:  # a file in memory
        console.file.write(data.decode(console.encoding))
        return
    with suppress(OSError):
        os.write(number, data)


class RunView:
    """Plain lines: what a log file, a pipe or a batch job gets. A context manager, as the live view is."""

    def __init__(
        self, console: Console, title_facts: Mapping[str, str], total_steps: int, log: RunLog | None = None
    ) -> None:
        self.console, self.facts, self.total_steps, self._log = console, dict(title_facts), total_steps, log

    def __enter__(self) -> Self:
        self._line("  ".join(f"{name} {value}" for name, value in self.facts.items()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def step(self, row: Row) -> None:
        self._line(step_line(row, self.total_steps))

    def valid(self, row: Row) -> None:
        self._line(valid_line(row))

    def evaluated(self, row: Row) -> None:
        self._line(eval_line(row))

    def saved(self, row: Row, text: str) -> None:
        """A checkpoint is on disk."""
        self.note(text)

    def note(self, text: str) -> None:
        self._line(text)

    def doing(self, text: str) -> None:
        """What the run does now, while no row comes."""

    def stopping(self, text: str) -> None:
        """As `doing`, called by a signal in the middle of whatever goes on."""
        self._show(text)

    def _line(self, text: str) -> None:
        if self._log is not None:
            self._log.line(text)
        self._show(text)

    def _show(self, text: str) -> None:
        print_line(self.console, text)


class LiveView(RunView):
    """A panel that is redrawn a few times a second by rich's own thread; rows only replace what it draws."""

    def __init__(
        self, console: Console, title_facts: Mapping[str, str], total_steps: int, log: RunLog | None = None
    ) -> None:
        super().__init__(console, title_facts, total_steps, log)
        self.panel = RunPanel(self.facts, total_steps)
        self._live = Live(self.panel, console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.panel.stop()
        with suppress(OSError):
            self._live.stop()

    def step(self, row: Row) -> None:
        self.panel.step(row)
        super().step(row)

    def valid(self, row: Row) -> None:
        self.panel.valid(row)
        super().valid(row)

    def evaluated(self, row: Row) -> None:
        self.panel.evaluated(row)
        super().evaluated(row)

    def saved(self, row: Row, text: str) -> None:
        self.panel.saved(row)
        super().saved(row, text)

    def note(self, text: str) -> None:
        super().note(text)
        with suppress(OSError):  # because: a terminal can go while its run stays
            self.console.print(Text(plain(text), overflow="fold"))

    def doing(self, text: str) -> None:
        self.panel.now = text

    stopping = doing  # because: another thread draws it

    def _show(self, text: str) -> None:
        pass  # the panel shows it; only notes are printed above


class RunPanel:
    """The panel itself: holds the latest rows and draws them at whatever width it is given, as late as it is now."""

    def __init__(self, facts: Mapping[str, str], total_steps: int, clock: Callable[[], float] = monotonic) -> None:
        self.facts, self.total_steps, self._clock = dict(facts), total_steps, clock
        # because: the drawing thread reads these while rows come in; they are replaced whole, never changed in place
        self.row: Row = {}
        self.last_valid: Row = {}
        self.last_evals: dict[str, Row] = {}
        self.last_save: tuple[int, float] | None = None  # its step, and when we heard of it
        self.losses: tuple[float, ...] = ()
        self.now = "computing the first step"
        self._row_at_s = clock()
        self._stopped_at_s: float | None = None

    def step(self, row: Row) -> None:
        if row.get("loss") is not None:
            self.losses = (*self.losses, float(row["loss"]))[-_KEPT_LOSSES:]
        self.row, self._row_at_s, self.now = dict(row), self._clock(), "Ctrl-C stops after a step"

    def valid(self, row: Row) -> None:
        self.last_valid = dict(row)

    def evaluated(self, row: Row) -> None:
        self.last_evals = self.last_evals | {str(row["name"]): dict(row)}

    def saved(self, row: Row) -> None:
        self.last_save = (int(row["saved_step"]), self._clock())

    def stop(self) -> None:
        """From here on the clock stands still."""
        self._stopped_at_s = self._clock()

    def _time_s(self) -> float:
        return self._clock() if self._stopped_at_s is None else self._stopped_at_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 140)
        inner = width - 4
        figures = self._figures(inner, options.ascii_only)
        body = Group(self._facts_line(), self._progress(inner), Text(""), figures, *self._evals())
        title = Text(self.facts.get("run", "run"), style="bold", overflow="ellipsis", no_wrap=True)
        yield Panel(body, title=title, title_align="left", border_style="cyan", width=width)
        if self._stopped_at_s is None:
            # because: what is typed, ^C above all, is echoed behind the last line; behind a full one it would begin a
            # new line, and everything would be drawn one line too low
            yield Text(f"  {self.now}", style="dim", overflow="ellipsis", no_wrap=True)

    def _facts_line(self) -> Text:
        parts = [Text.assemble((f"{k} ", "dim"), str(v)) for k, v in self.facts.items() if k != "run"]
        return Text("  ", overflow="fold").join(parts)

    def _progress(self, width: int) -> Table:
        step = int(self.row.get("step", 0))
        eta = self.row.get("eta_s")
        left = "-" if eta is None else ticking(max(eta - (self._time_s() - self._row_at_s), 0.0))
        done = Text.assemble(f"step {step}/{self.total_steps}", ("  left ", "dim"), left)
        line = Table.grid(expand=True, padding=(0, 2, 0, 0))
        line.add_column(ratio=1)
        line.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=max(self.total_steps, 1), completed=step, width=max(width - done.cell_len - 2, 4))
        line.add_row(bar, done)
        return line

    def _figures(self, width: int, ascii_only: bool) -> Table:
        since_s = self._time_s() - self._row_at_s
        row, two = {**self.row, "elapsed_s": self.row.get("elapsed_s", 0.0) + since_s}, width + 4 >= _TWO_COLUMNS
        half = width // 2 if two else width
        loss, validation = figures(row, self.last_valid)
        spark = "" if ascii_only else sparkline(self.losses, max(half - 19 - len(loss), 0))
        left: list[tuple[str, RenderableType]] = [
            ("loss", Text.assemble((loss, "bold"), "  ", (spark, "green"))),
            ("smoothed loss", Text(_number(smoothed(self.losses), ".4f"))),
            ("validation", Text(validation)),
            ("learning rate", Text(_number(row.get("lr"), ".2e"))),
            ("gradient norm", Text(_number(row.get("grad_norm"), ".3f"))),
            ("skipped steps", Text(_number(row.get("skipped"), "d"), style="red" if row.get("skipped") else "")),
        ]
        right = [(name, Text(value)) for name, value in [*compute(row), ("last save", self._save())]]
        grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
        for _ in range(2 if two else 1):
            grid.add_column(width=13, style="dim", no_wrap=True)
            grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for pair in zip(left, right, strict=True) if two else ((item,) for item in (*left, *right)):
            grid.add_row(*(cell for item in pair for cell in item))
        return grid

    def _evals(self) -> list[Text]:
        return [
            Text.assemble((f"{name}  ", "dim"), f"{', '.join(eval_figures(row))} at step {row['step']}",
                          overflow="ellipsis", no_wrap=True)
            for name, row in self.last_evals.items()
        ]  # fmt: skip

    def _save(self) -> str:
        if self.last_save is None:
            return "-"
        step, at_s = self.last_save
        return f"step {step}, {ticking(self._time_s() - at_s)} ago"


def _number(value: Any, spec: str) -> str:
    return "-" if value is None else format(value, spec)
