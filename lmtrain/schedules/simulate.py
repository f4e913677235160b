"""Replays a table with costs: when each action runs, the makespan, the bubble, the activations held. No torch.

Called by the planner, the preview of a run, and tests that compare it with closed forms and with a real pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmtrain.schedules.table import Action, Kind, Table, in_order, needs


@dataclass(frozen=True)
class Span:
    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    spans: tuple[Span, ...]
    num_ranks: int

    @property
    def makespan(self) -> float:
        return max(span.end for span in self.spans)

    @property
    def busy(self) -> list[float]:
        """How long each rank works."""
        times = [0.0] * self.num_ranks
        for span in self.spans:
            times[span.rank] += span.end - span.start
        return times

    @property
    def bubble(self) -> float:
        """Time that a rank stands still, as a share of its work; of the rank that stands still most."""
        return self.makespan / min(self.busy) - 1


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of one stage and microbatch; a whole backward is both of its halves."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    send: float = 0.0  # from one rank to another

    def of(self, action: Action) -> float:
        match action.kind:
            case Kind.FORWARD:
                return self.forward
            case Kind.INPUT:
                return self.input
            case Kind.WEIGHT:
                return self.weight
        return self.input + self.weight


def simulate(table: Table, costs: Costs | None = None, cost: Callable[[Action], float] | None = None) -> Timeline:
    """Each rank takes its actions in order, as soon as what they need has arrived. `cost` may tell stages apart."""
    costs = costs or Costs()
    cost = cost or costs.of
    ends: dict[Action, float] = {}
    free = [0.0] * table.num_ranks
    spans = []
    for rank, action in in_order(table.actions, table.num_stages - 1):
        arrived = (
            ends[need] + (costs.send if table.rank_of[need.stage] != rank else 0.0)
            for need in needs(action, table.num_stages - 1)
        )  # fmt: skip
        start = max(free[rank], *arrived, 0.0)
        ends[action] = free[rank] = start + cost(action)
        spans.append(Span(rank, action, start, ends[action]))
    return Timeline(tuple(spans), table.num_ranks)


def activations_held(table: Table) -> list[int]:
    """The most stage-microbatches whose activations a rank holds at once: from F to B, or to W."""
    peaks = []
    for actions in table.actions:
        held = peak = 0
        for action in actions:
            if action.kind is Kind.FORWARD:
                held += 1
                peak = max(peak, held)
            elif action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                held -= 1
        peaks.append(peak)
    return peaks
