"""`lmtrain eval --compare A B`: what B has more than A on the same items, and whether that is more than chance.

From two results files with their samples, or from two checkpoints that are scored now.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.cli.eval_session import Options, Session, new_document, print_document, write_document
from lmtrain.errors import DataError, LmtrainError, UsageError

if TYPE_CHECKING:
    from lmtrain.eval.paired import Side
    from lmtrain.eval.task import Task


def compare_files(a: Path, b: Path, options: Options) -> None:
    pairs, alone = _pairs(_sides(a), _sides(b))
    if not pairs:
        raise DataError(f"{a} and {b} share no task: {'; '.join(alone)}. Evaluate both on the same one.")
    _tell(pairs, alone, new_document("lmtrain comparison", a={"file": str(a)}, b={"file": str(b)}), options)


def compare_checkpoints(a: Path, b: Path, session: Session) -> None:
    from lmtrain.eval.paired import Side

    sides: list[list[tuple[Task, Side]]] = []
    models: list[dict[str, Any]] = []
    with session.journal() as journal:
        for checkpoint in (a, b):
            loaded = session.load(checkpoint)
            models.append(loaded.facts)
            name = str(loaded.facts["checkpoint"])
            sides.append([(t, Side(name, o.result, o.columns)) for t, o in session.outcomes(loaded, journal)])
            del loaded  # because: two models need not fit in memory
        pairs = [(task, x, y) for (task, x), (_, y) in zip(*sides, strict=True)]
        results = [[side.result.to_dict() for _, side in some] for some in sides]
        of = [{"model": model, "results": found} for model, found in zip(models, results, strict=True)]
        _tell(pairs, [], new_document("lmtrain comparison", a=of[0], b=of[1]), session.options)


def _tell(pairs: list[tuple[Task, Side, Side]], alone: list[str], document: dict[str, Any], options: Options) -> None:
    from lmtrain.cli.screen import Screen
    from lmtrain.eval.paired import compare
    from lmtrain.eval.report import render_comparison

    found = [compare(task, a, b) for task, a, b in pairs]
    document |= {"complete": True, "comparisons": [one.to_dict() for one in found], "left_out": alone}
    write_document(document, options)
    if options.as_json:
        return print_document(document)
    screen = Screen(highlight=False)
    for name, side in zip("AB", pairs[0][1:], strict=True):
        screen.print(f"{name}  {side.name}", soft_wrap=True)
    for one in found:
        screen.print(render_comparison(one, full=options.full))
    for said in alone:
        screen.print(f"left out: {said}")
    return None


def _pairs(a: list[Side], b: list[Side]) -> tuple[list[tuple[Task, Side, Side]], list[str]]:
    """By task and, where one was asked of several texts, by text; what one side has alone is named."""
    from lmtrain.eval.task import find_task

    found, rest = [], list(b)
    alone = []
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
    from lmtrain.eval.paired import Side
    from lmtrain.eval.result import Result
    from lmtrain.eval.samples import read_columns
    from lmtrain.runtime.files import read_json

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
