"""One run's pipeline, replayed: every action of its schedule's table, with its stage's own layers and collectives.

Called where one layout is looked at closely; pipeline.makespan is its closed form for thousands. Says when FSDP gathers
and reduces as parallel.sharding has it: nothing is hidden here but what the table itself hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmtrain.placement.stages import Stage
from lmtrain.plan.ours import Planned
from lmtrain.schedules.simulate import Costs, Timeline, simulate
from lmtrain.schedules.table import Action, Kind


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of one microbatch in one block, of one message between ranks, of one collective of a group of weights."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    send: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0


def replay(run: Planned, seconds: Seconds, count: int | None = None) -> Timeline:
    """A step, or one of `count` microbatches."""
    parallel = run.parallel
    table = parallel.pipeline.table(parallel.pp, parallel.vp, count or run.num_microbatches)
    stages = {stage.number: stage for held in run.stages for stage in held}
    talk = dict[Action, float]()
    if parallel.layout.dp > 1:
        for row in table.actions:
            talk |= _collectives(row, stages, parallel.zero, table.num_microbatches - 1, seconds)
    work = Costs(forward=seconds.forward, input=seconds.input, weight=seconds.weight)
    return simulate(
        table, Costs(send=seconds.send),
        cost=lambda action: len(stages[action.stage].layers) * work.of(action) + talk.get(action, 0.0),
    )  # fmt: skip


def _collectives(
    row: Sequence[Action], stages: dict[int, Stage], zero: int, last: int, seconds: Seconds
) -> dict[Action, float]:
    """What each action of a rank waits for. A group is a block, or what a stage of an end has besides."""
    found = dict[Action, float]()
    gathered = set[tuple[int, str]]()
    for action in row:
        stage = stages[action.stage]
        blocks, root = len(stage.layers), int(stage.first or stage.last)
        gathers = reduces = 0
        for groups, word in ((blocks, "blocks"), (root, "root")):
            held = action.stage, word
            if action.kind is not Kind.WEIGHT and held not in gathered:
                gathers += groups
                gathered.add(held)
            if zero == 3 and (word == "blocks" or action.kind is Kind.BACKWARD):
                gathered.discard(held)  # a block after each use, the rest after a backward
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT) and (zero >= 2 or action.microbatch == last):
            reduces = blocks + root
        found[action] = gathers * seconds.gather + reduces * seconds.reduce
    return found
