"""`lmtrain eval RUN --steps all`: a measure over training, a line for every checkpoint as it comes, a small curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from lmtrain.cli.eval.session import Session, new_document
from lmtrain.errors import MissingInputError, UsageError, a_few

if TYPE_CHECKING:
    from rich.console import Console

    from lmtrain.eval.result import Result
    from lmtrain.eval.source import Source

_CURVE = 40  # characters


def find_steps(run: Path, asked: str) -> list[Path]:
    """The run's checkpoints of these steps, oldest first."""
    from lmtrain.checkpoint.store import CHECKPOINTS, list_checkpoints, step_of

    found = {step_of(path.name): path for path in list_checkpoints(run / CHECKPOINTS) or list_checkpoints(run)}
    if not found:
        raise MissingInputError(f"{run} holds no checkpoints, which --steps goes through. Give a run's folder.")
    if asked == "all":
        return list(found.values())
    words = [word.strip() for word in asked.split(",")]
    if not all(word.isdecimal() and len(word) < 19 for word in words):
        raise UsageError(f"--steps={asked} is neither all nor steps. Give all, or steps as in --steps 100,200.")
    steps = sorted({int(word) for word in words})
    missing = [f"{step}" for step in steps if step not in found]
    if missing:
        there = a_few([str(step) for step in found], most=12)
        raise MissingInputError(
            f"{run} has no checkpoint of step {a_few(missing)}. It has {there}; --steps all is all."
        )
    return [found[step] for step in steps]


def evaluate_steps(sources: Sequence[Source], session: Session) -> None:
    """A line for each checkpoint as it comes; then the recipe of the last one, and the curve."""
    from lmtrain.eval.report import render

    document = new_document("lmtrain evaluation over steps", run=str(sources[0].path.parent), steps=[])
    found: list[tuple[int, list[Result]]] = []
    with ExitStack() as kept:
        try:
            with session.processes() as load:
                journal = None
                for number, source in enumerate(sources):
                    loaded = load(source, number)
                    journal = journal or kept.enter_context(session.journal())
                    found.append((loaded.facts["step"], []))
                    for outcome in session.outcomes(loaded, journal):
                        found[-1][1].append(outcome.result)
                        _print_row(session.screen, loaded.facts["step"], outcome.result)
                    results = [result.to_dict() for result in found[-1][1]]
                    document["steps"].append({"model": loaded.facts, "results": results})
                    session.write(document)
            document["complete"] = True
            session.write(document)
        finally:
            if document["steps"]:
                session.end(document)
    for row in zip(*(results for _, results in found), strict=True):
        session.screen.print()
        session.screen.print(render(row[-1], loaded.facts, full=session.options.full))
        _print_curve(session.screen, [step for step, _ in found], row)


def _print_row(screen: Console, step: int, result: Result) -> None:
    from lmtrain.observe.screen.row_text import show_measure

    name = result.headline
    low_high = [show_measure(name, edge) for edge in result.intervals.get(name, ())]
    within = f"  ({' to '.join(low_high)})" if low_high else ""
    value = show_measure(name, result.measures[name])
    screen.print(f"step {step:>9,}  {result.protocol}  {name} {value:>12}{within}", soft_wrap=True)


def _print_curve(screen: Console, steps: Sequence[int], results: Sequence[Result]) -> None:
    from lmtrain.observe.screen.row_text import show_measure, sparkline

    name = results[0].headline
    values = [result.measures[name] for result in results]
    if screen.encoding.startswith("utf"):
        screen.print(f"curve  {sparkline(values, _CURVE)}  of {name} over {len(steps)} checkpoints")
    finite: list[tuple[float, int]] = [(v, s) for v, s in zip(values, steps, strict=True) if math.isfinite(v)]
    if finite:
        best, step = max(finite) if name.endswith("accuracy") else min(finite)
        screen.print(f"best   {show_measure(name, best)} at step {step:,}")
