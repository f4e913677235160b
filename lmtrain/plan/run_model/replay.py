"""Replay of a run's pipeline: every action of the schedule table, with each stage's own layers and collectives.

Called for layouts that are shown or chosen; price.step.makespan is the closed form for thousands of layouts.
Collectives run when FSDP runs them in parallel.sharding; they are hidden only as far as the table itself hides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmtrain.plan.price.hardware import Factors, Hardware
from lmtrain.plan.price.step import StepTime, price_microbatch, price_step
from lmtrain.plan.price.workload import columns
from lmtrain.plan.run_model.ranks import groups_of
from lmtrain.plan.run_model.run import Planned, case_of
from lmtrain.schedules.simulate import Costs, Timeline, makespan, simulate
from lmtrain.schedules.table import Action, Kind


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of a micro-batch in a block, of a message between ranks, and of a collective on a group of weights."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    head: float = 0.0  # extra per micro-batch in the last stage: one product forward, two backward
    wait: float = 0.0  # a rank's waiting for messages beyond their transit, per stage and direction
    send: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0

    def of(self, kind: Kind, num_layers: int, *, last: bool) -> float:
        head = self.head / 3 if last else 0.0
        match kind:
            case Kind.FORWARD:
                return num_layers * self.forward + head + self.wait
            case Kind.INPUT:
                return num_layers * self.input + head + self.wait
            case Kind.WEIGHT:
                return num_layers * self.weight + head
        return num_layers * (self.input + self.weight) + 2 * head + self.wait


def price_runs(runs: Sequence[Planned], hardware: Hardware, factors: Factors) -> tuple[StepTime, list[Seconds]]:
    """Return step times with replayed pipelines, and each run's seconds per micro-batch."""
    c = columns([case_of(run, hardware) for run in runs])
    one = price_microbatch(c, factors)
    parts = {
        "forward": one.forward, "input": one.backward - one.weight, "weight": one.weight, "head": one.head,
        "wait": one.sends / (2 * c.vp),
    }  # fmt: skip
    each = [Seconds(**{name: float(part[at]) for name, part in parts.items()}) for at in range(len(c))]
    pipelines = np.array([pipeline_seconds(run, one) for run, one in zip(runs, each, strict=True)])
    return price_step(c, factors, pipelines), each


def pipeline_seconds(run: Planned, seconds: Seconds) -> float:
    """Return seconds of all micro-batches of a step, without collectives over dp."""
    parallel, costs = run.parallel, costs_of(run, seconds)
    if parallel.pp == 1:
        return run.num_microbatches * (costs[Kind.FORWARD, 0] + costs[Kind.BACKWARD, 0])
    return makespan(parallel.pipeline, parallel.pp, parallel.vp, run.num_microbatches, costs)


def costs_of(run: Planned, seconds: Seconds) -> dict[tuple[Kind, int], float]:
    """Return the seconds of each kind of action in each stage, keyed by (kind, stage)."""
    return {
        (kind, stage.number): seconds.of(kind, len(stage.layers), last=stage.last)
        for kind in Kind for held in run.stages for stage in held
    }  # fmt: skip


def replay(run: Planned, seconds: Seconds, count: int | None = None) -> Timeline:
    """Simulate one training step and return its timeline. `count` overrides the number of micro-batches."""
    parallel = run.parallel
    table = parallel.pipeline.table(parallel.pp, parallel.vp, count or run.num_microbatches)
    groups = {stage.number: groups_of(run, stage) for held in run.stages for stage in held}
    talk = dict[Action, float]()
    if parallel.layout.dp > 1:
        for row in table.actions:
            talk |= _collectives(row, groups, parallel.zero, table.num_microbatches - 1, seconds)
    costs = costs_of(run, seconds)
    return simulate(
        table, Costs(send=seconds.send),
        cost=lambda action: costs[action.kind, action.stage] + talk.get(action, 0.0),
    )  # fmt: skip


def _collectives(
    row: Sequence[Action], groups: dict[int, dict[str, int]], zero: int, last: int, seconds: Seconds
) -> dict[Action, float]:
    """Return the seconds of dp collectives that each action of a rank waits for.

    `groups` counts the weight groups of each stage by kind: a block, a vocabulary table, or the rest of the stage.
    `last` is the last micro-batch's number.
    """
    found = dict[Action, float]()
    gathered = set[tuple[int, str]]()
    for action in row:
        gathers = reduces = 0
        for kind, num in groups[action.stage].items():
            held = action.stage, kind
            used = action.kind is Kind.FORWARD if kind == "embedding" else action.kind is not Kind.WEIGHT
            if used and held not in gathered:
                gathers += num
                gathered.add(held)
            if zero == 3 and (kind in ("blocks", "embedding") or action.kind is Kind.BACKWARD):
                gathered.discard(held)  # blocks and embedding are freed after each use, other groups after a backward
            half = Kind.INPUT if kind == "embedding" else Kind.WEIGHT
            if action.kind in (Kind.BACKWARD, half) and (zero >= 2 or action.microbatch == last):
                reduces += num
        found[action] = gathers * seconds.gather + reduces * seconds.reduce
    return found
