"""Replay of a run's pipeline: every action of the schedule table, with each stage's own layers and collectives.

Called for layouts that are shown or chosen; price.step_time.makespan is the closed form for thousands of layouts.
Collectives run when FSDP runs them in parallel.sharding; they are hidden only as far as the table itself hides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmtrain.plan.price.hardware import Factors, Hardware
from lmtrain.plan.price.step_time import StepTime, price_microbatch, price_step
from lmtrain.plan.price.workload import build_columns
from lmtrain.plan.run_model.planned_run import PlannedRun, case_of
from lmtrain.plan.run_model.rank_bytes import count_weight_groups
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

    def of_action(self, kind: Kind, num_layers: int, *, in_last_stage: bool) -> float:
        """Return the seconds of an action in a stage with `num_layers` blocks."""
        head = self.head / 3 if in_last_stage else 0.0
        match kind:
            case Kind.FORWARD:
                return num_layers * self.forward + head + self.wait
            case Kind.INPUT:
                return num_layers * self.input + head + self.wait
            case Kind.WEIGHT:
                return num_layers * self.weight + head
        return num_layers * (self.input + self.weight) + 2 * head + self.wait


def price_runs(runs: Sequence[PlannedRun], hardware: Hardware, factors: Factors) -> tuple[StepTime, list[Seconds]]:
    """Return step times with replayed pipelines, and each run's seconds per micro-batch."""
    cases = build_columns([case_of(run, hardware) for run in runs])
    microbatch = price_microbatch(cases, factors)
    parts = {
        "forward": microbatch.forward, "input": microbatch.backward - microbatch.weight,
        "weight": microbatch.weight, "head": microbatch.head,
        "wait": microbatch.sends / (2 * cases.vp),
    }  # fmt: skip
    run_seconds = [Seconds(**{name: float(part[index]) for name, part in parts.items()}) for index in range(len(cases))]
    pipelines = np.array([pipeline_seconds(run, seconds) for run, seconds in zip(runs, run_seconds, strict=True)])
    return price_step(cases, factors, pipelines), run_seconds


def pipeline_seconds(run: PlannedRun, seconds: Seconds) -> float:
    """Return seconds of all micro-batches of a step, without collectives over dp."""
    parallel, costs = run.parallel, action_seconds(run, seconds)
    if parallel.pp == 1:
        return run.num_microbatches * (costs[Kind.FORWARD, 0] + costs[Kind.BACKWARD, 0])
    return makespan(parallel.pipeline, parallel.pp, parallel.vp, run.num_microbatches, costs)


def action_seconds(run: PlannedRun, seconds: Seconds) -> dict[tuple[Kind, int], float]:
    """Return the seconds of each kind of action in each stage, keyed by (kind, stage)."""
    return {
        (kind, stage.number): seconds.of_action(kind, len(stage.layers), in_last_stage=stage.last)
        for kind in Kind for stages in run.stages for stage in stages
    }  # fmt: skip


def replay_step(run: PlannedRun, seconds: Seconds, num_microbatches: int | None = None) -> Timeline:
    """Simulate one training step and return its timeline. `num_microbatches` overrides the run's own."""
    parallel = run.parallel
    table = parallel.pipeline.table(parallel.pp, parallel.vp, num_microbatches or run.num_microbatches)
    group_counts = {stage.number: count_weight_groups(run, stage) for stages in run.stages for stage in stages}
    collective_s = dict[Action, float]()
    if parallel.layout.dp > 1:
        for row in table.actions:
            collective_s |= _collective_seconds(row, group_counts, parallel.zero, table.num_microbatches - 1, seconds)
    costs = action_seconds(run, seconds)
    return simulate(
        table, Costs(send=seconds.send),
        cost=lambda action: costs[action.kind, action.stage] + collective_s.get(action, 0.0),
    )  # fmt: skip


def _collective_seconds(
    row: Sequence[Action], group_counts: dict[int, dict[str, int]], zero: int, last_microbatch: int, seconds: Seconds
) -> dict[Action, float]:
    """Return the seconds of dp collectives that each action of a rank waits for.

    `group_counts` counts each stage's weight groups by kind: a block, a vocabulary table, the rest of the stage.
    `last_microbatch` is the number of the step's last micro-batch.
    """
    seconds_by_action = dict[Action, float]()
    gathered = set[tuple[int, str]]()
    for action in row:
        gathers = reduces = 0
        for kind, num in group_counts[action.stage].items():
            group = action.stage, kind
            is_used = action.kind is Kind.FORWARD if kind == "embedding" else action.kind is not Kind.WEIGHT
            if is_used and group not in gathered:
                gathers += num
                gathered.add(group)
            if zero == 3 and (kind in ("blocks", "embedding") or action.kind is Kind.BACKWARD):
                gathered.discard(group)  # blocks and embedding are freed after each use, other groups after a backward
            reducing_half = Kind.INPUT if kind == "embedding" else Kind.WEIGHT
            if action.kind in (Kind.BACKWARD, reducing_half) and (zero >= 2 or action.microbatch == last_microbatch):
                reduces += num
        seconds_by_action[action] = gathers * seconds.gather + reduces * seconds.reduce
    return seconds_by_action
