"""A pipeline's step as rows of letters, a rank a row: when each works on what, replayed from the schedule's table.

Called by the views of a plan. Long steps are shown by fewer microbatches, with the same beginning and end.
"""

from __future__ import annotations

from collections.abc import Iterator

from lmtrain.plan.run_model.replay import replay
from lmtrain.plan.search.result import Answer
from lmtrain.schedules.simulate import Timeline
from lmtrain.schedules.table import Kind

_MOST_RANKS = 8
_SIGNS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT: "B", Kind.WEIGHT: "W"}


def timeline(one: Answer) -> tuple[Timeline, int]:
    """A step of a few microbatches, as long as they are priced, and how many these are."""
    count = min(one.run.num_microbatches, 2 * one.run.parallel.pp)
    return replay(one.run, one.microbatch, count), count


def shown_ranks(num_ranks: int, most: int = _MOST_RANKS) -> list[int]:
    """All of them, or as many, evenly, with the first and the last."""
    if num_ranks <= most:
        return list(range(num_ranks))
    return [round(at * (num_ranks - 1) / (most - 1)) for at in range(most)]


def picture(one: Answer, width: int, *, plain: bool) -> Iterator[str]:
    found, count = timeline(one)
    total, parallel = found.makespan, one.run.parallel
    few = (
        "" if count == one.run.num_microbatches else f", shown with {count} of {one.run.num_microbatches} microbatches"
    )
    yield f"pipeline: {parallel.schedule}, {parallel.pp} ranks x {parallel.vp}{few}"
    gap, columns = "." if plain else "·", min(width, 120) - 6
    for rank in shown_ranks(parallel.pp):
        cells = [gap] * columns
        for span in found.spans:
            if span.rank == rank:
                first, last = int(span.start / total * columns), int(span.end / total * columns)
                for at in range(first, max(min(last, columns), first + 1)):
                    cells[min(at, columns - 1)] = _SIGNS[span.action.kind]
        yield f"{rank:>4}  {''.join(cells)}".rstrip()
    yield f"      F forward, B backward, W weights' gradients, {gap} waits"
