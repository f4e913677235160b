"""What `lmtrain eval` shows: each result as it comes, the curve of a run's checkpoints, and comparisons.

Called by evaluate. The scoring itself is in lmtrain/start/evaluation/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from lmtrain.cli.screen.print_facts_and_tables import PlainConsole
from lmtrain.cli.screen.print_messages_and_json import print_json, print_message
from lmtrain.eval.print_evaluation_results import render, render_comparison
from lmtrain.eval.task import Result
from lmtrain.observe.screen import command_progress
from lmtrain.observe.screen.metrics_row_text import sparkline
from lmtrain.start.evaluation.compare_results import ComparedResults
from lmtrain.start.evaluation.run_tasks import Views
from lmtrain.units import format_measure

_CURVE_WIDTH = 40  # characters


class EvaluationScreen:
    """The screen of an evaluation: results and documents on stdout, messages and progress on stderr."""

    def __init__(self, *, is_quiet: bool, as_json: bool, full: bool) -> None:
        """Create a screen for --json and --full; if it `is_quiet`, as on ranks other than 0, nothing is printed."""
        self._messages = PlainConsole(stderr=True, quiet=is_quiet)
        self._results = PlainConsole(highlight=False, quiet=is_quiet or as_json)
        self._prints_json, self._full = as_json and not is_quiet, full

    def views(self) -> Views:
        """Return the functions with which a session shows what it does."""
        return Views(
            report=lambda message: print_message(self._messages, message),
            show_progress=lambda activity, unit, note: command_progress.progress(
                self._messages, activity, unit, stop_note=note
            ),
            show_document=self.print_document,
        )

    def print_document(self, document: dict[str, Any]) -> None:
        """Print a results document as JSON with --json."""
        if self._prints_json:
            print_json(document, ensure_ascii=False, allow_nan=False)

    def print_result(self, result: Result, model: dict[str, Any]) -> None:
        """Print the result of a task on a model, which has these facts."""
        self._results.print(render(result, model, full=self._full))

    def print_step_result(self, result: Result, model: dict[str, Any]) -> None:
        """Print one line: the step of the checkpoint, the task, and the result's headline measure (its main score),
        with its interval if it has one.
        """
        name = result.headline
        low_high = [format_measure(name, edge) for edge in result.intervals.get(name, ())]
        interval = f"  ({' to '.join(low_high)})" if low_high else ""
        value, step = format_measure(name, result.measures[name]), model["step"]
        self._results.print(f"step {step:>9,}  {result.protocol}  {name} {value:>12}{interval}", soft_wrap=True)

    def print_curves(self, steps: Sequence[tuple[dict[str, Any], Sequence[Result]]]) -> None:
        """Print, for each task, the result of the last checkpoint and a curve over all. `steps` has, for each
        checkpoint, its facts and its result of each task.
        """
        numbers = [model["step"] for model, _ in steps]
        for row in zip(*(results for _, results in steps), strict=True):
            self._results.print()
            self.print_result(row[-1], steps[-1][0])
            _print_curve(self._results, numbers, row)

    def print_comparison(self, compared: ComparedResults) -> None:
        """Print the names of A and B, each task's comparison, and what only one of them has; with --json the document.
        """
        self.print_document(compared.document)
        for name, side in zip("AB", compared.pairs[0][1:], strict=True):
            self._results.print(f"{name}  {side.name}", soft_wrap=True)
        for comparison in compared.comparisons:
            self._results.print(render_comparison(comparison, full=self._full))
        for text in compared.unpaired:
            self._results.print(f"left out: {text}")


def _print_curve(screen: Console, steps: Sequence[int], results: Sequence[Result]) -> None:
    """Print one task's headline measure (its main score) over the checkpoints as a sparkline, and its best value with
    the step. `results` holds one result for each of `steps`.
    """
    name = results[0].headline
    values = [result.measures[name] for result in results]
    if screen.encoding.startswith("utf"):
        screen.print(f"curve  {sparkline(values, _CURVE_WIDTH)}  of {name} over {len(steps)} checkpoints")
    finite: list[tuple[float, int]] = [(v, s) for v, s in zip(values, steps, strict=True) if math.isfinite(v)]
    if finite:
        best, step = max(finite) if name.endswith("accuracy") else min(finite)
        screen.print(f"best   {format_measure(name, best)} at step {step:,}")
