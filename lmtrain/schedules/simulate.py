"""A simulator of schedule tables: action times, makespan, bubble and activations held. No torch.

Called by the planner, the preview of a run, and tests that compare it with closed forms and with a real pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from lmtrain.schedules.pipeline_schedule import PipelineSchedule
from lmtrain.schedules.table import Action, Kind, Table, executable_order, prerequisites

_ROUNDS = 3  # rounds of `num_ranks` micro-batches after which a pipeline's pattern repeats
_KINDS = list(Kind)
_Step = tuple[int, int, int, int]  # index of the cost, rank, numbers of two steps that must end first (0: none)


def makespan(
    schedule: PipelineSchedule, num_ranks: int, chunks: int, num_microbatches: int,
    costs: Mapping[tuple[Kind, int], float],
) -> float:  # fmt: skip
    """Return the seconds of a step with `chunks` stages per rank. `costs` holds seconds by kind of action and stage.

    Many micro-batches are extrapolated from a few rounds, after which the pattern repeats.
    """

    def simulated_seconds(count: int) -> float:
        return _last_end(_steps(schedule, num_ranks, chunks, count), num_ranks, seconds)

    seconds = [costs[kind, stage] for kind in _KINDS for stage in range(num_ranks * chunks)]
    short = _ROUNDS * num_ranks + num_microbatches % num_ranks
    longer = short + num_ranks
    if num_microbatches <= longer:
        return simulated_seconds(num_microbatches)
    work = [0.0] * num_ranks
    for stage, rank in enumerate(schedule.ranks_of_stages(num_ranks, chunks)):
        work[rank] += costs[Kind.FORWARD, stage] + costs[Kind.BACKWARD, stage]
    end = simulated_seconds(longer)
    # because: among about equally busy ranks the busiest sets the pace only after many rounds, but finally it does
    return end + (num_microbatches - longer) * max((end - simulated_seconds(short)) / num_ranks, *work)


def _last_end(steps: Sequence[_Step], num_ranks: int, costs: Sequence[float]) -> float:
    """Return the seconds until the last rank is done. `costs` are those of kind x num_stages + stage."""
    ends, free = [0.0], [0.0] * num_ranks
    for at, rank, first_need, second_need in steps:
        start = free[rank]
        if ends[first_need] > start:  # because: max() of three values takes twice as long as two comparisons
            start = ends[first_need]
        if ends[second_need] > start:
            start = ends[second_need]
        free[rank] = end = start + costs[at]
        ends.append(end)
    return max(free)


@lru_cache(maxsize=32)
def _steps(schedule: PipelineSchedule, num_ranks: int, chunks: int, count: int) -> list[_Step]:
    """Return the schedule's actions in an executable order; steps are numbered from 1. Raise ValueError on a deadlock.
    """
    num_stages = num_ranks * chunks
    rows = [list(schedule.row(rank, num_ranks, chunks, count)) for rank in range(num_ranks)]
    place = {kind: [0] * (num_stages * count + 1) for kind in _KINDS}  # step numbers; the last entry is unused
    steps: list[_Step] = []
    at, num_left = [0] * num_ranks, sum(map(len, rows))
    while num_left:
        before = num_left
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                kind, stage, microbatch = row[at[rank]]
                place_index = stage * count + microbatch
                match kind:
                    case Kind.FORWARD:
                        first_need = second_need = place[kind][place_index - count] if stage else -1
                    case Kind.WEIGHT:
                        first_need = second_need = place[Kind.INPUT][place_index]
                    case _:
                        first_need = place[Kind.FORWARD][place_index]
                        second_need = place[kind][place_index + count] if stage < num_stages - 1 else -1
                if not first_need or not second_need:
                    break
                steps.append((_KINDS.index(kind) * num_stages + stage, rank, max(first_need, 0), max(second_need, 0)))
                place[kind][place_index] = len(steps)
                at[rank] += 1
                num_left -= 1
        if num_left == before:
            raise ValueError(f"the schedule {schedule.kind} deadlocks")
    return steps


@dataclass(frozen=True)
class Span:
    """An action's start and end in seconds on a rank."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The simulated spans of all ranks in a step."""

    spans: tuple[Span, ...]
    num_ranks: int

    @property
    def makespan(self) -> float:
        """The seconds from the start until the last action ends."""
        return max(span.end for span in self.spans)

    @property
    def busy(self) -> list[float]:
        """The seconds that each rank works."""
        times = [0.0] * self.num_ranks
        for span in self.spans:
            times[span.rank] += span.end - span.start
        return times

    @property
    def bubble(self) -> float:
        """The largest idle time of a rank as a share of the rank's work."""
        return self.makespan / min(self.busy) - 1


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds per stage and micro-batch; a whole backward costs `input` plus `weight`."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    send: float = 0.0  # seconds of a message from a rank to another

    def of(self, action: Action) -> float:
        """Return the seconds of an action."""
        parts = {Kind.FORWARD: self.forward, Kind.INPUT: self.input, Kind.WEIGHT: self.weight}
        return parts.get(action.kind, self.input + self.weight)


def simulate(table: Table, costs: Costs = Costs(), cost: Callable[[Action], float] | None = None) -> Timeline:
    """Return the timeline if each rank runs its actions in order, each as soon as its inputs have arrived.

    `cost` overrides `costs.of`, for costs that differ by stage.
    """
    cost = cost or costs.of
    ends: dict[Action, float] = {}
    free = [0.0] * table.num_ranks
    spans = []
    for rank, action in executable_order(table.actions, table.num_stages - 1):
        arrived = (
            ends[prerequisite] + (costs.send if table.rank_of[prerequisite.stage] != rank else 0.0)
            for prerequisite in prerequisites(action, table.num_stages - 1)
        )  # fmt: skip
        start = max(free[rank], *arrived, 0.0)
        ends[action] = free[rank] = start + cost(action)
        spans.append(Span(rank, action, start, ends[action]))
    return Timeline(tuple(spans), table.num_ranks)


def activations_held(table: Table) -> list[int]:
    """Return, for each rank, the peak number of (stage, micro-batch) pairs with held activations: from F to B, or to W.
    """
    change = {Kind.FORWARD: 1, Kind.INPUT: 0, Kind.BACKWARD: -1, Kind.WEIGHT: -1}
    return [max(accumulate(change[action.kind] for action in actions), default=0) for actions in table.actions]
