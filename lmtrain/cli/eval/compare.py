"""`lmtrain eval --compare A B`: what B has more than A on the same items, and whether that is more than chance.

From two results files with their samples, or from two checkpoints that are scored now.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from lmtrain.cli.eval.session import Options, Session, new_document, print_document
from lmtrain.cli.screen.console import Screen
from lmtrain.errors import DataError, LmtrainError, UsageError
from lmtrain.eval.report import read_columns, render_comparison
from lmtrain.eval.source import Source
from lmtrain.eval.statistics import Comparison, Side, compare
from lmtrain.eval.task import Result, Task, find_task
from lmtrain.runtime.files.files import read_json, write_json

Pair = tuple[Task, Side, Side]


def compare_files(a: Path, b: Path, options: Options) -> None:
    pairs, alone = _pairs(_sides(a), _sides(b))
    if not pairs:
        raise DataError(f"{a} and {b} share no task: {'; '.join(alone)}. Evaluate both on the same one.")
    document = new_document("lmtrain comparison", a={"file": str(a)}, b={"file": str(b)}, left_out=alone)
    found = _compared(pairs, document)
    if options.output is not None:
        write_json(options.output, document)
    if options.as_json:
        return print_document(document)
    return _print(Screen(highlight=False), pairs, found, alone, options.full)


def compare_models(sources: Sequence[Source], session: Session) -> None:
    sides: list[list[Side]] = []
    models: list[dict[str, Any]] = []
    with ExitStack() as kept:
        with session.processes() as load:
            journal = None
            for number, source in enumerate(sources):
                loaded = load(source, number)
                journal = journal or kept.enter_context(session.journal())
                name = str(loaded.facts["checkpoint"])
                sides.append([Side(name, one.result, one.columns) for one in session.outcomes(loaded, journal)])
                models.append(loaded.facts | {"results": [side.result.to_dict() for side in sides[-1]]})
                del loaded  # because: two models need not fit in memory
        pairs = [(session.tasks[i], x, y) for i, (x, y) in enumerate(zip(*sides, strict=True))]
        document = new_document("lmtrain comparison", a=models[0], b=models[1], left_out=[])
        found = _compared(pairs, document)
        session.write(document)
        session.end(document)
    _print(session.screen, pairs, found, [], session.options.full)


def _compared(pairs: list[Pair], document: dict[str, Any]) -> list[Comparison]:
    found = [compare(task, a, b) for task, a, b in pairs]
    document |= {"complete": True, "comparisons": [one.to_dict() for one in found]}
    return found


def _print(screen: Console, pairs: list[Pair], found: list[Comparison], alone: list[str], full: bool) -> None:
    for name, side in zip("AB", pairs[0][1:], strict=True):
        screen.print(f"{name}  {side.name}", soft_wrap=True)
    for one in found:
        screen.print(render_comparison(one, full=full))
    for said in alone:
        screen.print(f"left out: {said}")


def _pairs(a: list[Side], b: list[Side]) -> tuple[list[Pair], list[str]]:
    """By task and, where one was asked of several texts, by text; what one side has alone is named."""
    found, rest, alone = [], list(b), []
    for one in a:
        same = [other for other in rest if other.result.task == one.result.task]
        other = next((o for o in same if o.result.text_sha256 == one.result.text_sha256), next(iter(same), None))
        if other is None:
            alone.append(f"{one.result.protocol} only in {one.name}")
            continue
        rest.remove(other)
        found.append((find_task(one.result.task), one, other))
    return found, alone + [f"{other.result.protocol} only in {other.name}" for other in rest]


def _sides(path: Path) -> list[Side]:
    """The results of a file, each with its items' columns."""
    document = read_json(path)
    if not isinstance(document, dict) or document.get("format") != "lmtrain evaluation":
        raise DataError(f"{path} holds no results of `lmtrain eval --output`. Give such a file, or a checkpoint.")
    if "samples" not in document:
        raise UsageError(
            f"{path} was written without --samples, so that its items are not known. Evaluate with --samples FILE, or "
            "give the checkpoints themselves."
        )
    try:
        samples = document["samples"]
        columns = read_columns(path.parent / samples["file"], samples["sha256"])
        results = [Result.from_dict(one) for one in document["results"]]
        sides = [Side(str(path), result, columns[number]) for number, result in enumerate(results)]
        if any(len(values) != side.result.num_items for side in sides for values in side.columns.values()):
            raise ValueError("another number of items")
    except LmtrainError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} or its samples are not as this version writes them ({type(error).__name__}: {error}). "
            "Evaluate once more."
        ) from error
    return sides
