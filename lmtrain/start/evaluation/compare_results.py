"""Two models, or two results files with their samples, compared item by item.

Called by evaluate once its options have been checked. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.unopened_model_on_disk import ModelSource
from lmtrain.errors import DataError, UsageError
from lmtrain.eval.print_evaluation_results import read_columns
from lmtrain.eval.statistics import Comparison, Side, compare
from lmtrain.eval.task import Result, Task, find_task
from lmtrain.runtime.files.atomic_files import read_json, write_json
from lmtrain.start.evaluation.run_tasks import Options, Session, new_document

Pair = tuple[Task, Side, Side]


@dataclass(frozen=True)
class ComparedResults:
    """The results of A and B that were compared, and the document that the command writes and prints about them."""

    pairs: Sequence[Pair]
    comparisons: Sequence[Comparison]  # of each pair
    unpaired: Sequence[str]  # a sentence for each result that only A or B has
    document: dict[str, Any]


def compare_files(file_a: Path, file_b: Path, options: Options) -> ComparedResults:
    """Compare two results files of `lmtrain eval --output --samples`, A and B, by the values of each item. Write the
    differences, B minus A, to --output. Raise DataError if they have no task in common.
    """
    pairs, unpaired = _pair_results(_read_sides(file_a), _read_sides(file_b))
    if not pairs:
        raise DataError(
            f"The results files {file_a} and {file_b} have no task in common: {'; '.join(unpaired)}. Evaluate both "
            "checkpoints on the same task."
        )
    sides = {name: {"file": str(file)} for name, file in zip("ab", (file_a, file_b), strict=True)}
    document = new_document("lmtrain comparison", options.origin, **sides, left_out=unpaired)
    comparisons = _compare_pairs(pairs, document)
    if options.output is not None:
        write_json(options.output, document)
    return ComparedResults(pairs, comparisons, unpaired, document)


def compare_models(sources: Sequence[ModelSource], session: Session) -> ComparedResults:
    """Run all tasks on two models, A and B, one after the other, and compare them by the values of each item. Write the
    differences, B minus A, to --output.
    """
    sides: list[list[Side]] = []
    models: list[dict[str, Any]] = []
    with ExitStack() as stack:
        with session.open_loader() as load:
            for number, source in enumerate(sources):
                loaded = load(source, number)
                name = str(loaded.facts["checkpoint"])
                outcomes = session.evaluate_tasks(loaded, stack)
                sides.append([Side(name, outcome.result, outcome.columns) for outcome in outcomes])
                models.append(loaded.facts | {"results": [side.result.to_dict() for side in sides[-1]]})
                del loaded  # because: two models need not fit in memory
        pairs = [*zip((task for task, _ in session.jobs), sides[0], sides[1], strict=True)]
        document = new_document("lmtrain comparison", session.options.origin, a=models[0], b=models[1], left_out=[])
        comparisons = _compare_pairs(pairs, document)
        session.write(document)
    return ComparedResults(pairs, comparisons, [], document)


def _compare_pairs(pairs: list[Pair], document: dict[str, Any]) -> list[Comparison]:
    """Compare the results A and B of each pair and return the comparisons in the same order. Add them to `document`,
    the JSON output, in place, and mark it as complete.
    """
    comparisons = [compare(task, a, b) for task, a, b in pairs]
    document |= {"complete": True, "comparisons": [comparison.to_dict() for comparison in comparisons]}
    return comparisons


def _pair_results(a: list[Side], b: list[Side]) -> tuple[list[Pair], list[str]]:
    """Pair the results of A with those of B that have the same task, and preferably the same text. Return (task, result
    of A, result of B) for each pair, and a sentence for each result that has no partner.
    """
    pairs, unmatched, unpaired = [], list(b), []
    for side in a:
        same_task = [other for other in unmatched if other.result.task == side.result.task]
        text = side.result.text_sha256
        other = next((o for o in same_task if o.result.text_sha256 == text), next(iter(same_task), None))
        if other is None:
            unpaired.append(f"{side.result.protocol} only in {side.name}")
            continue
        unmatched.remove(other)
        pairs.append((find_task(side.result.task), side, other))
    return pairs, unpaired + [f"{other.result.protocol} only in {other.name}" for other in unmatched]


def _read_sides(path: Path) -> list[Side]:
    """Return the results in a file of `lmtrain eval --output --samples`, each with its values per item, read from the
    samples file beside it. Raise UsageError if it was written without --samples, DataError if it is damaged.
    """
    document = read_json(path)
    if not isinstance(document, dict) or document.get("format") != "lmtrain evaluation":
        raise DataError(f"{path} is not a results file of `lmtrain eval --output`. Give such a file, or a checkpoint.")
    if "samples" not in document:
        raise UsageError(
            f"{path} was written without --samples, so it has no values per item to compare. Evaluate with --samples "
            "FILE, or give two checkpoints instead of results files."
        )
    try:
        samples = document["samples"]
        columns = read_columns(path.parent / samples["file"], samples["sha256"])
        sides = [
            Side(str(path), Result.from_dict(result), columns[number])
            for number, result in enumerate(document["results"])
        ]
        if any(len(values) != side.result.num_items for side in sides for values in side.columns.values()):
            raise ValueError("the samples file must have one value for each item of the results")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} or its samples file is damaged or was written by another version of lmtrain "
            f"({type(error).__name__}: {error}). Run the evaluation again."
        ) from error
    return sides
