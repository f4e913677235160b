"""What a person sees while a run trains: a live panel on a terminal, plain one-line logs everywhere else.

Called by the training loop with the rows of metrics.jsonl; decides nothing and never raises for a row that lacks a
figure. Every line also goes to the run folder's log.txt.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lmtrain.observe.log import RunLog
from lmtrain.observe.words import Row, compute, figures, seconds, sparkline, step_line, valid_line

_KEPT_LOSSES = 512
_TWO_COLUMNS = 70  # below this width the figures stand in one column


def build_view(
    console: Console, title_facts: Mapping[str, str], total_steps: int, *, log: RunLog | None = None
) -> RunView:
    """The view that suits this console. `title_facts["run"]` is the title; the other facts are listed below it."""
    live = console.is_interactive and not console.is_dumb_terminal and console.file.isatty()
    return (LiveView if live else RunView)(console, title_facts, total_steps, log)


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

    def note(self, text: str) -> None:
        self._line(text)

    def _line(self, text: str) -> None:
        if self._log is not None:
            self._log.line(text)
        self._show(text)

    def _show(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


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
        self._live.stop()

    def step(self, row: Row) -> None:
        self.panel.step(row)
        super().step(row)

    def valid(self, row: Row) -> None:
        self.panel.valid(row)
        super().valid(row)

    def note(self, text: str) -> None:
        super().note(text)
        self.console.print(Text(text, overflow="fold"))

    def _show(self, text: str) -> None:
        pass  # the panel shows it; only notes are printed above


class RunPanel:
    """The panel itself: holds the latest rows and draws them at whatever width it is given."""

    def __init__(self, facts: Mapping[str, str], total_steps: int) -> None:
        self.facts, self.total_steps = dict(facts), total_steps
        # because: the drawing thread reads these while rows come in; they are replaced whole, never changed in place
        self.row: Row = {}
        self.last_valid: Row = {}
        self.losses: tuple[float, ...] = ()

    def step(self, row: Row) -> None:
        if row.get("loss") is not None:
            self.losses = (*self.losses, float(row["loss"]))[-_KEPT_LOSSES:]
        self.row = dict(row)

    def valid(self, row: Row) -> None:
        self.last_valid = dict(row)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 140)
        inner = width - 4
        body = Group(self._facts_line(), self._progress(inner), Text(""), self._figures(inner, options.ascii_only))
        title = Text(self.facts.get("run", "run"), style="bold", overflow="ellipsis", no_wrap=True)
        yield Panel(body, title=title, title_align="left", border_style="cyan", width=width)

    def _facts_line(self) -> Text:
        parts = [Text.assemble((f"{k} ", "dim"), str(v)) for k, v in self.facts.items() if k != "run"]
        return Text("  ", overflow="fold").join(parts)

    def _progress(self, width: int) -> Table:
        step = int(self.row.get("step", 0))
        eta = self.row.get("eta_s")
        done = Text.assemble(f"step {step}/{self.total_steps}", ("  left ", "dim"), seconds(eta))
        line = Table.grid(expand=True, padding=(0, 2, 0, 0))
        line.add_column(ratio=1)
        line.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=max(self.total_steps, 1), completed=step, width=max(width - done.cell_len - 2, 4))
        line.add_row(bar, done)
        return line

    def _figures(self, width: int, ascii_only: bool) -> Table:
        row, two = self.row, width + 4 >= _TWO_COLUMNS
        half = width // 2 if two else width
        loss, validation = figures(row, self.last_valid)
        spark = "" if ascii_only else sparkline(self.losses, max(half - 19 - len(loss), 0))
        left = [
            ("loss", Text.assemble((loss, "bold"), "  ", (spark, "green"))),
            ("validation", Text(validation)),
            ("learning rate", Text(_number(row.get("lr"), ".2e"))),
            ("gradient norm", Text(_number(row.get("grad_norm"), ".3f"))),
            ("skipped steps", Text(_number(row.get("skipped"), "d"), style="red" if row.get("skipped") else "")),
        ]
        right = [(name, Text(value)) for name, value in compute(row)]
        grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
        for _ in range(2 if two else 1):
            grid.add_column(width=13, style="dim", no_wrap=True)
            grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for pair in zip(left, right, strict=True) if two else ((item,) for item in (*left, *right)):
            grid.add_row(*(cell for item in pair for cell in item))
        return grid


def _number(value: Any, spec: str) -> str:
    return "-" if value is None else format(value, spec)
