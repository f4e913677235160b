"""How long a table takes whose stages differ, for many layouts: only the last end is kept. No torch, no clock.

Called by the planner. simulate says the same of one table, with every action's time. A step of many microbatches
repeats itself, so two short ones are replayed and the rest follows: exactly, but for interleaved stages whose ranks do
not divide the microbatches, which are within some two percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from lmtrain.schedules.pipeline_schedule import PipelineSchedule
from lmtrain.schedules.table import Kind

_ROUNDS = 3  # of as many microbatches as ranks: then a pipeline repeats itself
_KINDS = list(Kind)
_Step = tuple[int, int, int, int]  # where its cost stands, its rank, and which two steps come before it: 0 is none


def makespan(
    schedule: PipelineSchedule, num_ranks: int, chunks: int, num_microbatches: int,
    costs: Mapping[tuple[Kind, int], float],
) -> float:  # fmt: skip
    """`costs`: seconds by kind and stage."""

    def replayed(count: int) -> float:
        return _last_end(_steps(schedule, num_ranks, chunks, count), num_ranks, listed)

    listed = [costs[kind, stage] for kind in _KINDS for stage in range(num_ranks * chunks)]
    few = _ROUNDS * num_ranks + num_microbatches % num_ranks
    more = few + num_ranks
    if num_microbatches <= more:
        return replayed(num_microbatches)
    work = [0.0] * num_ranks
    for stage, rank in enumerate(schedule.ranks_of_stages(num_ranks, chunks)):
        work[rank] += costs[Kind.FORWARD, stage] + costs[Kind.BACKWARD, stage]
    end = replayed(more)
    # because: of ranks that are about as busy it takes long until the busiest is all that counts, but in the end it is
    return end + (num_microbatches - more) * max((end - replayed(few)) / num_ranks, *work)


def _last_end(steps: Sequence[_Step], num_ranks: int, costs: Sequence[float]) -> float:
    ends, free = [0.0], [0.0] * num_ranks
    for at, rank, one, other in steps:
        start = free[rank]
        if ends[one] > start:  # because: max() of three takes twice as long
            start = ends[one]
        if ends[other] > start:
            start = ends[other]
        free[rank] = end = start + costs[at]
        ends.append(end)
    return max(free)


@lru_cache(maxsize=32)
def _steps(schedule: PipelineSchedule, num_ranks: int, chunks: int, count: int) -> list[_Step]:
    """A table's actions in an order in which they can happen, counted from 1."""
    num_stages = num_ranks * chunks
    rows = [list(schedule.row(rank, num_ranks, chunks, count)) for rank in range(num_ranks)]
    place = {kind: [0] * (num_stages * count + 1) for kind in _KINDS}  # in what is found; the last one is no action
    found: list[_Step] = []
    at, left = [0] * num_ranks, sum(map(len, rows))
    while left:
        before = left
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                kind, stage, microbatch = row[at[rank]]
                here = stage * count + microbatch
                match kind:
                    case Kind.FORWARD:
                        one = other = place[kind][here - count] if stage else -1
                    case Kind.WEIGHT:
                        one = other = place[Kind.INPUT][here]
                    case _:
                        one = place[Kind.FORWARD][here]
                        other = place[kind][here + count] if stage < num_stages - 1 else -1
                if not one or not other:
                    break
                found.append((_KINDS.index(kind) * num_stages + stage, rank, max(one, 0), max(other, 0)))
                place[kind][here] = len(found)
                at[rank] += 1
                left -= 1
        if left == before:
            raise ValueError(f"the schedule {schedule.kind} comes to a halt")
    return found
