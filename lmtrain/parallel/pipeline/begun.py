"""What is told of each forward and backward of this rank: to the weights, to the watch, to faults on purpose.

Handed by ParallelModel to the runner of its stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from lmtrain.observe.measure import phases
from lmtrain.runtime.processes.faults import fault_point
from lmtrain.schedules.table import Action, Kind

if TYPE_CHECKING:
    from lmtrain.parallel.weights.precision import MasterWeights
    from lmtrain.parallel.weights.sharding import ShardedWeights

Weights: TypeAlias = "MasterWeights | ShardedWeights"
_HALVES = {Kind.INPUT: "input", Kind.WEIGHT: "weight"}


class Begun:
    """Gradients are sent when they are whole, so the weights hear of every action."""

    def __init__(self, weights: Weights, count: int) -> None:
        self.weights, self.last = weights, count - 1

    def begin(self, action: Action) -> None:
        phase = "forward" if action.kind is Kind.FORWARD else "backward"
        phases.enter(phase, microbatch=action.microbatch, stage=action.stage, half=_HALVES.get(action.kind, ""))
        fault_point(phase)
        self.weights.begin(action, action.microbatch == self.last)

    def done(self, action: Action) -> None:
        self.weights.done(action, action.microbatch == self.last)
        phases.leave()
