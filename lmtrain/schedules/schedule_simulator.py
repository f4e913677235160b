"""A simulator of schedule tables: action times, makespan, bubble and activations held. No torch.

Called by the planner, and by tests that compare it with closed forms and with a real pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from lmtrain.schedules.pipeline_schedule import PipelineSchedule
from lmtrain.schedules.table import Action, Kind, ScheduleTable, executable_order, prerequisites

_ROUNDS = 3  # rounds of `num_ranks` micro-batches after which a pipeline's pattern repeats
_KINDS = list(Kind)
# (index of the cost, rank, numbers of two actions that must end first, counted from 1 in the list's order; 0: none)
_OrderedAction = tuple[int, int, int, int]


def makespan(
    schedule: PipelineSchedule, num_ranks: int, chunks: int, num_microbatches: int,
    costs: Mapping[tuple[Kind, int], float],
) -> float:  # fmt: skip
    """Return the simulated seconds of a training step's pipeline, from the first action to the end of the last, with
    `num_ranks` ranks of `chunks` stages each. `costs` maps (kind of action, stage) to seconds; messages between ranks
    take no time.

    Many micro-batches are extrapolated from a few rounds, after which the pattern repeats.
    """

    def simulated_seconds(count: int) -> float:
        return _simulated_end_s(_actions_in_order(schedule, num_ranks, chunks, count), num_ranks, seconds)

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


def _simulated_end_s(actions: Sequence[_OrderedAction], num_ranks: int, costs: Sequence[float]) -> float:
    """Return the simulated seconds until the last of `actions` has ended. `actions` is a result of `_actions_in_order`;
    `costs` lists the seconds of actions at the indices that it gives: index of the kind x num_stages + stage.
    """
    ends, free = [0.0], [0.0] * num_ranks
    for at, rank, first_need, second_need in actions:
        start = free[rank]
        if ends[first_need] > start:  # because: max() of three values takes twice as long as two comparisons
            start = ends[first_need]
        if ends[second_need] > start:
            start = ends[second_need]
        free[rank] = end = start + costs[at]
        ends.append(end)
    return max(free)


@lru_cache(maxsize=32)
def _actions_in_order(
    schedule: PipelineSchedule, num_ranks: int, chunks: int, num_microbatches: int
) -> list[_OrderedAction]:
    """Return the actions of all ranks, sorted so that each comes after those that it depends on, as tuples: (index of
    its cost, rank, number of one action that must end first, number of another). Actions are numbered from 1 in this
    order; 0 stands for none. Raise ValueError if the ranks would deadlock.
    """
    num_stages = num_ranks * chunks
    rows = [list(schedule.row(rank, num_ranks, chunks, num_microbatches)) for rank in range(num_ranks)]
    # each action's number in the order; the last entry is unused
    number_of = {kind: [0] * (num_stages * num_microbatches + 1) for kind in _KINDS}
    ordered: list[_OrderedAction] = []
    at, num_left = [0] * num_ranks, sum(map(len, rows))
    while num_left:
        before = num_left
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                kind, stage, microbatch = row[at[rank]]
                index = stage * num_microbatches + microbatch
                match kind:
                    case Kind.FORWARD:
                        first_need = second_need = number_of[kind][index - num_microbatches] if stage else -1
                    case Kind.WEIGHT:
                        first_need = second_need = number_of[Kind.INPUT][index]
                    case _:
                        first_need = number_of[Kind.FORWARD][index]
                        second_need = number_of[kind][index + num_microbatches] if stage < num_stages - 1 else -1
                if not first_need or not second_need:
                    break
                ordered.append((_KINDS.index(kind) * num_stages + stage, rank, max(first_need, 0), max(second_need, 0)))
                number_of[kind][index] = len(ordered)
                at[rank] += 1
                num_left -= 1
        if num_left == before:
            raise ValueError(f"The pipeline schedule {schedule.kind} deadlocks: each rank waits for another one.")
    return ordered


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
        """Seconds for which each rank runs actions, as a list by rank; the rest of the makespan is its idle time."""
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


def simulate(
    table: ScheduleTable, costs: Costs = Costs(), cost_of: Callable[[Action], float] | None = None
) -> Timeline:
    """Return a timeline with the start and end of every action in the table, in seconds. Each rank runs its actions in
    the table's order, each as soon as the actions that it depends on have ended and their messages arrived. `costs`
    holds seconds by kind of action; `cost_of(action)`, if given, replaces them, apart from those of messages.
    """
    cost_of = cost_of or costs.of
    ends: dict[Action, float] = {}
    free = [0.0] * table.num_ranks
    spans = []
    for rank, action in executable_order(table.actions, table.num_stages - 1):
        arrived = (
            ends[prerequisite] + (costs.send if table.rank_of[prerequisite.stage] != rank else 0.0)
            for prerequisite in prerequisites(action, table.num_stages - 1)
        )  # fmt: skip
        start = max(free[rank], *arrived, 0.0)
        ends[action] = free[rank] = start + cost_of(action)
        spans.append(Span(rank, action, start, ends[action]))
    return Timeline(tuple(spans), table.num_ranks)


def activations_held(table: ScheduleTable) -> list[int]:
    """Return, for each rank, the peak number of (stage, micro-batch) pairs with held activations: from F to B, or to W.
    """
    change = {Kind.FORWARD: 1, Kind.INPUT: 0, Kind.BACKWARD: -1, Kind.WEIGHT: -1}
    return [max(accumulate(change[action.kind] for action in actions), default=0) for actions in table.actions]
