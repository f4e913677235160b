"""`lmtrain eval RUN --steps all`: a measure over training, a line for every checkpoint as it comes, a small curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmtrain.cli.eval_session import Session, new_document, print_document, write_document
from lmtrain.errors import MissingInputError, UsageError, a_few

if TYPE_CHECKING:
    from rich.console import Console

    from lmtrain.eval.result import Result

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


def evaluate_steps(run: Path, checkpoints: Sequence[Path], session: Session) -> None:
    from lmtrain.cli.screen import Screen
    from lmtrain.eval.report import render

    options, screen = session.options, Screen(highlight=False)
    document = new_document("lmtrain evaluation over steps", run=str(run), steps=[])
    found: list[tuple[int, list[Result]]] = []
    with session.journal() as journal:
        try:
            for checkpoint in checkpoints:
                loaded = session.load(checkpoint)
                results: list[Result] = []
                for _, outcome in session.outcomes(loaded, journal):
                    results.append(outcome.result)
                    if not options.as_json:
                        _print_row(screen, loaded.facts["step"], outcome.result)
                found.append((loaded.facts["step"], results))
                document["steps"].append({"model": loaded.facts, "results": [one.to_dict() for one in results]})
                write_document(document, options)
            document["complete"] = True
            write_document(document, options)
        finally:
            if options.as_json and document["steps"]:
                print_document(document)
        if options.as_json:
            return
        for row in zip(*(results for _, results in found), strict=True):
            screen.print()
            screen.print(render(row[-1], loaded.facts, full=options.full))
            _print_curve(screen, [step for step, _ in found], row)


def _print_row(screen: Console, step: int, result: Result) -> None:
    from lmtrain.eval.report import show_measure

    name = result.headline
    low_high = [show_measure(name, edge) for edge in result.intervals.get(name, ())]
    within = f"  ({' to '.join(low_high)})" if low_high else ""
    value = show_measure(name, result.measures[name])
    screen.print(f"step {step:>9,}  {result.protocol}  {name} {value:>12}{within}", soft_wrap=True)


def _print_curve(screen: Console, steps: Sequence[int], results: Sequence[Result]) -> None:
    from lmtrain.eval.report import show_measure
    from lmtrain.observe.words import sparkline

    name = results[0].headline
    values = [result.measures[name] for result in results]
    if screen.encoding.startswith("utf"):
        screen.print(f"curve  {sparkline(values, _CURVE)}  of {name} over {len(steps)} checkpoints")
    finite: list[tuple[float, int]] = [(v, s) for v, s in zip(values, steps, strict=True) if math.isfinite(v)]
    if finite:
        best, step = max(finite) if name.endswith("accuracy") else min(finite)
        screen.print(f"best   {show_measure(name, best)} at step {step:,}")
