"""The live panel of a run: holds the newest rows and draws them at any width, with times counted up to now.

Used by the live view of a run, and by `lmtrain watch`, which reads the same rows from the run folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from time import monotonic
from types import MappingProxyType
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lmtrain.observe.screen.command_progress import progress_bar
from lmtrain.observe.screen.metrics_row_text import (
    Row,
    eval_figures,
    format_clock,
    format_domains,
    format_percent,
    format_terms,
    loss_figures,
    smoothed_loss,
    sparkline,
    speed_figures,
)
from lmtrain.observe.stragglers.find_slow_ranks import slow_link_line, slow_rank_line

FIRST_STEP = "computing the first step"
_NUM_LOSSES = 512
_TWO_COLUMN_WIDTH = 70  # terminal width below which the figures stand in one column


@dataclass(frozen=True)
class SaveSchedule:
    """The schedule of checkpoints from the settings."""

    interval_steps: int | None = None  # 0: only by time and at the end; None: never
    interval_s: float | None = None

    def next_step(self, step: int, total_steps: int) -> int | None:
        if self.interval_steps is None:
            return None
        return min(step + self.interval_steps - step % self.interval_steps if self.interval_steps else total_steps,
                   total_steps)  # fmt: skip


class RunPanel:
    """A box on the terminal with the newest figures of a run; rich draws it anew at each refresh."""

    def __init__(
        self, facts: Mapping[str, str], total_steps: int, clock: Callable[[], float] = monotonic,
        saves: SaveSchedule | None = None, stages: Mapping[str, int] = MappingProxyType({}),
        start: Row = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Set up the panel. `facts` is what stands above the figures, its entry "run" the title; `stages` is the last
        step of each stage of the run, in order; `start` has the step and the stage at which this view begins.
        """
        self.stages, self.start = dict(stages), dict(start)
        self.facts, self.total_steps, self._clock, self.saves = dict(facts), total_steps, clock, saves or SaveSchedule()
        # because: the drawing thread reads these fields while rows come in; each is replaced whole, never changed in
        # place
        self.row: Row = {}
        self.last_valid: Row = {}
        self.last_evals: dict[str, Row] = {}
        self.last_save: tuple[int, float] | None = None  # step, and the clock's time at which its row came
        self.losses: tuple[float, ...] = ()
        self.activity = FIRST_STEP
        self._row_at_s = self._began_s = clock()
        self._stopped_at_s: float | None = None

    def show_row(self, row: Row, age_s: float = 0.0) -> None:
        """Show a row of metrics.jsonl, which was written `age_s` seconds ago."""
        match row["event"]:
            case "start" | "stage":
                self.start = dict(row)
                self.row = {key: value for key, value in self.row.items() if key != "stage"}
            case "step":
                if row.get("loss") is not None:
                    self.losses = (*self.losses, float(row["loss"]))[-_NUM_LOSSES:]
                self.row, self._row_at_s, self.activity = dict(row), self._clock() - age_s, "Ctrl-C stops after a step"
            case "valid":
                self.last_valid = dict(row)
            case "eval":
                self.last_evals = self.last_evals | {str(row["name"]): dict(row)}
            case "save":
                self.last_save = (int(row["saved_step"]), self._clock() - age_s)

    def freeze(self, *, at_last_row: bool = False) -> None:
        """Stop the panel's clock, so that the times it shows no longer advance: at the present time, or with
        `at_last_row` at the time of the newest step or save.
        """
        last_row_s = max(self._row_at_s, self.last_save[1] if self.last_save else self._row_at_s)
        self._stopped_at_s = last_row_s if at_last_row else self._clock()

    def _time_s(self) -> float:
        return self._clock() if self._stopped_at_s is None else self._stopped_at_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 140)
        inner = width - 4
        yield Panel(
            Group(
                self._facts_lines(inner), self._progress(inner), Text(""), self._figures(inner, options.ascii_only),
                *self._slow_lines(), *self._evaluation_lines(),
            ),
            title=Text(self.facts.get("run", "run"), style="bold", overflow="ellipsis", no_wrap=True),
            title_align="left", border_style="cyan", width=width,
        )  # fmt: skip
        if self._stopped_at_s is None:
            # because: the terminal echoes ^C after the last line; after a full line the echo would begin a new line,
            # and the next redraw would be one line too low
            yield Text(f"  {self.activity}", style="dim", overflow="ellipsis", no_wrap=True)

    def _facts_lines(self, width: int) -> Text:
        """Return the facts about the run (model, layout, ...) as text of at most `width` columns, with line breaks only
        between facts.
        """
        lines = [Text(overflow="fold")]
        for name, value in self.facts.items():
            if name == "run":
                continue
            fact = Text.assemble((f"{name} ", "dim"), str(value))
            if lines[-1] and lines[-1].cell_len + 2 + fact.cell_len > width:
                lines.append(Text(overflow="fold"))
            lines[-1].append_text(Text("  ") + fact if lines[-1] else fact)
        return Text("\n", overflow="fold").join(lines)

    def _progress(self, width: int) -> Table:
        step = int(self.row.get("step", self.start.get("step", 0)))
        eta = self.row.get("eta_s")
        remaining = "-" if eta is None else format_clock(max(eta - (self._time_s() - self._row_at_s), 0.0))
        done = Text.assemble(f"step {step}/{self.total_steps}", ("  left ", "dim"), remaining)
        line = Table.grid(expand=True, padding=(0, 2, 0, 0))
        line.add_column(ratio=1)
        line.add_column(justify="right", no_wrap=True)
        line.add_row(progress_bar(step, max(self.total_steps, 1), max(width - done.cell_len - 2, 4)), done)
        return line

    def _figures(self, width: int, ascii_only: bool) -> Table:
        since_s = self._time_s() - self._row_at_s
        row = {**self.row, "elapsed_s": self.row.get("elapsed_s", 0.0) + since_s}
        has_two_columns = width + 4 >= _TWO_COLUMN_WIDTH
        half = width // 2 if has_two_columns else width
        (loss, validation), average = loss_figures(row, self.last_valid), self.last_valid.get("ema")
        spark = "" if ascii_only else sparkline(self.losses, max(half - 19 - len(loss), 0))
        left: list[tuple[str, RenderableType]] = [
            ("loss", Text.assemble((loss, "bold"), "  ", (spark, "green"))),
            *([("its terms", Text(format_terms(row).strip(" ()")))] if format_terms(row) else []),
            *([("z-loss", Text(_number(row["z_loss"], ".2e")))] if "z_loss" in row else []),
            ("smoothed loss", Text(_number(smoothed_loss(self.losses), ".4f"))),
            ("validation", Text(validation)),
            *([("average", Text(f"{average['loss']:.4f} with averaged weights{format_domains(average)}"))]
              if average else []),
            ("learning rate", Text(_number(row.get("lr"), ".2e"))),
            ("gradient norm", Text(_number(row.get("grad_norm"), ".3f"))),
            ("skipped steps", Text(_number(row.get("skipped"), "d"), style="red" if row.get("skipped") else "")),
        ]
        right: list[tuple[str, RenderableType]] = [
            (name, Text(value)) for name, value in [*speed_figures(row), ("last save", self._last_save_text())]
        ]
        for number, figure in enumerate(self._extra_figures(row, since_s)):
            (right if number % 2 else left).append(figure)
        grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
        for _ in range(2 if has_two_columns else 1):
            grid.add_column(width=13, style="dim", no_wrap=True)
            grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        pairs = zip_longest(left, right, fillvalue=("", ""))
        for line in pairs if has_two_columns else ((figure,) for figure in (*left, *right)):
            grid.add_row(*(cell for figure in line for cell in figure))
        return grid

    def _extra_figures(self, row: Row, since_s: float) -> Iterator[tuple[str, RenderableType]]:
        """Yield (label, text) for the figures that only some step rows have: training stage, slowest rank, pipeline
        bubble, communication, next save and time limit. `since_s` is the age of the step row `row` in seconds.
        """
        if words := self._stage_text(row):
            yield "stage", Text(words)
        if row.get("straggler_slowest") is not None:
            yield "slowest rank", Text(f"rank {row['straggler_slowest']}: {100 * row['straggler_slowest_by']:+.1f}%")
        if row.get("straggler_bubble") is not None:
            yield "bubble", Text(f"{format_percent(row['straggler_bubble'])} of a step")
        if row.get("straggler_exposed") is not None:
            yield "communication", Text(f"{format_percent(row['straggler_exposed'])}, not hidden")
        goes_on = self._stopped_at_s is None and row.get("step", 0) < self.total_steps
        if "step" in row and goes_on and (words := self._next_save_text(row, since_s)):
            yield "next save", Text(words)
        if row.get("limit_left_s") is not None:
            left_s = row["limit_left_s"] - since_s
            yield "time is up", Text(f"in {format_clock(max(left_s, 0.0))}", style="red" if left_s < 60 else "")

    def _stage_text(self, row: Row) -> str:
        """Return the training stage of the step row `row` as text: its name, its number among the run's stages, and its
        last step. Return an empty text in a run without stages.
        """
        names, name = list(self.stages), row.get("stage", self.start.get("stage"))
        if name not in names:
            return str(name or "")
        return f"{name} {names.index(name) + 1}/{len(names)} to step {self.stages[name]}"

    def _slow_lines(self) -> list[Text]:
        """Return lines of text for the panel: one about a slow rank and one about a slow link, each only if the newest
        step row reports it.
        """
        return [
            Text.assemble((f"{name:13} ", "dim"), (words, "red"), overflow="fold")
            for name, words in (("slow rank", slow_rank_line(self.row)), ("slow link", slow_link_line(self.row)))
            if words
        ]

    def _next_save_text(self, row: Row, since_s: float) -> str:
        """Return when the next checkpoint will be saved: at which step, or after which time if that comes first. Empty
        if none will be. `since_s` is the age of the step row `row` in seconds.
        """
        step, parts, at_s = int(row["step"]), [], math.inf
        if (at := self.saves.next_step(step, self.total_steps)) is None:
            return ""
        if at > step:
            parts.append(f"at step {at}")
            if row.get("eta_s") is not None:
                at_s = max(row["eta_s"] * (at - step) / (self.total_steps - step) - since_s, 0.0)
                parts = [f"at step {at}, in {format_clock(at_s)}"]
        if self.saves.interval_s is not None:
            since_save = self._time_s() - (self.last_save[1] if self.last_save else self._began_s)
            due_s = max(self.saves.interval_s - since_save, 0.0)
            if due_s < at_s:
                parts = [*parts * (at_s == math.inf), f"in {format_clock(due_s)} at the latest"]
        return "; ".join(parts)

    def _evaluation_lines(self) -> list[Text]:
        return [
            Text.assemble((f"{name}  ", "dim"), f"{', '.join(eval_figures(row))} at step {row['step']}",
                          overflow="ellipsis", no_wrap=True)
            for name, row in self.last_evals.items()
        ]  # fmt: skip

    def _last_save_text(self) -> str:
        if self.last_save is None:
            return "-"
        step, at_s = self.last_save
        return f"step {step}, {format_clock(self._time_s() - at_s)} ago"


def _number(value: Any, spec: str) -> str:
    return "-" if value is None else format(value, spec)
