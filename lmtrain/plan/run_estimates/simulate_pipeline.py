"""Simulation of a run's pipeline: every action of its schedule, with each stage's own layers and collectives.

Called for layouts that are shown (also by --dry-run) or chosen; step_time_and_energy.makespan is the closed form for
thousands of layouts. Collectives run when FSDP runs them (parallel/weights/fsdp_sharding); they are hidden only as far
as the schedule itself hides them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmtrain.models.model_settings import ModelSettings
from lmtrain.placement.layers_and_shards_of_ranks import stages_of_rank
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.plan.cost_model.hardware_figures import FittedFactors, Hardware
from lmtrain.plan.cost_model.step_time_and_energy import StepTime, price_microbatch, price_step
from lmtrain.plan.cost_model.training_workload import stack_cases
from lmtrain.plan.run_estimates.rank_memory_by_purpose import count_weight_groups
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun, build_case
from lmtrain.schedules.schedule_simulator import Costs, Timeline, activations_held, makespan, simulate
from lmtrain.schedules.table import Action, Kind


@dataclass(frozen=True, kw_only=True)
class OperationSeconds:
    """Seconds of the single operations of a simulated step: computation of one micro-batch in one block, a message
    between pipeline ranks, a collective on one FSDP group of weights.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    head: float = 0.0  # extra per micro-batch in the last stage: one product forward, two backward
    wait: float = 0.0  # a rank's waiting for messages beyond their transit, per stage and direction
    send: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0

    def seconds_of_action(self, kind: Kind, num_layers: int, *, in_last_stage: bool) -> float:
        """Return the seconds of one pipeline action on one micro-batch, in a stage with `num_layers` blocks and, with
        `in_last_stage`, the output head. `kind` is a forward, a whole backward, or the input or weight half of a split
        backward.
        """
        head = self.head / 3 if in_last_stage else 0.0
        match kind:
            case Kind.FORWARD:
                return num_layers * self.forward + head + self.wait
            case Kind.INPUT:
                return num_layers * self.input + head + self.wait
            case Kind.WEIGHT:
                return num_layers * self.weight + head
        return num_layers * (self.input + self.weight) + 2 * head + self.wait


def price_runs(
    runs: Sequence[PlannedRun], hardware: Hardware, factors: FittedFactors
) -> tuple[StepTime, list[OperationSeconds]]:
    """Predict the step time of each run on a machine, with a simulated pipeline. Return the seconds of a step by cause,
    as arrays over the runs, and for each run the seconds of its single operations (forward of a block, ...).
    """
    cases = stack_cases([build_case(run, hardware) for run in runs])
    microbatch = price_microbatch(cases, factors)
    parts = {
        "forward": microbatch.forward, "input": microbatch.backward - microbatch.weight,
        "weight": microbatch.weight, "head": microbatch.head,
        "wait": microbatch.sends / (2 * cases.vp),
    }  # fmt: skip
    run_seconds = [
        OperationSeconds(**{name: float(part[index]) for name, part in parts.items()}) for index in range(len(cases))
    ]
    pipelines = np.array([pipeline_seconds(run, seconds) for run, seconds in zip(runs, run_seconds, strict=True)])
    return price_step(cases, factors, pipelines), run_seconds


def summarize_schedule(
    model: ModelSettings, parallel: ParallelSettings, num_microbatches: int
) -> tuple[list[int], float, list[int]]:
    """Return what a pipeline's schedule decides: the number of blocks in each stage; the share of a step that is bubble
    if all actions take equally long; and for each pipeline rank the most micro-batches of a stage whose activations it
    holds at once.
    """
    table = parallel.pipeline.table(parallel.pp, parallel.vp, num_microbatches)
    stages = [stage for rank in range(parallel.pp) for stage in stages_of_rank(model, parallel, rank)]
    num_blocks = [len(stage.layers) for stage in sorted(stages, key=lambda stage: stage.number)]
    return num_blocks, simulate(table).bubble, activations_held(table)


def pipeline_seconds(run: PlannedRun, seconds: OperationSeconds) -> float:
    """Return the seconds from the first forward to the last backward of a training step of the run, for all
    micro-batches and without data-parallel collectives. `seconds` holds the durations of single operations, such as the
    forward of one block.
    """
    parallel, costs = run.parallel, action_seconds(run, seconds)
    if parallel.pp == 1:
        return run.num_microbatches * (costs[Kind.FORWARD, 0] + costs[Kind.BACKWARD, 0])
    return makespan(parallel.pipeline, parallel.pp, parallel.vp, run.num_microbatches, costs)


def action_seconds(run: PlannedRun, seconds: OperationSeconds) -> dict[tuple[Kind, int], float]:
    """Return (kind, stage number) -> seconds for each action of a run's pipeline on one micro-batch: forward, whole
    backward, and the two halves of a split backward. `seconds` holds the durations of single operations, such as the
    forward of one block.
    """
    return {
        (kind, stage.number): seconds.seconds_of_action(kind, len(stage.layers), in_last_stage=stage.last)
        for kind in Kind for stages in run.stages for stage in stages
    }  # fmt: skip


def replay_step(run: PlannedRun, seconds: OperationSeconds, num_microbatches: int | None = None) -> Timeline:
    """Simulate one training step of a run's pipeline and return the start and end of each action on each pipeline rank.
    `seconds` holds the durations of single operations, such as the forward of one block; `num_microbatches`, if given,
    replaces the run's own number.
    """
    parallel = run.parallel
    table = parallel.pipeline.table(parallel.pp, parallel.vp, num_microbatches or run.num_microbatches)
    group_counts = {stage.number: count_weight_groups(run, stage) for stages in run.stages for stage in stages}
    collective_s = dict[Action, float]()
    if parallel.layout.dp > 1:
        for rank_actions in table.actions:
            collective_s |= _collective_seconds(
                rank_actions, group_counts, parallel.zero, table.num_microbatches - 1, seconds
            )
    costs = action_seconds(run, seconds)
    return simulate(
        table, Costs(send=seconds.send),
        cost_of=lambda action: costs[action.kind, action.stage] + collective_s.get(action, 0.0),
    )  # fmt: skip


def _collective_seconds(
    rank_actions: Sequence[Action],
    group_counts: dict[int, dict[str, int]],
    zero_stage: int,
    last_microbatch: int,
    seconds: OperationSeconds,
) -> dict[Action, float]:
    """Return, for each action in the list of one pipeline rank, the seconds of FSDP's collectives that it has to wait
    for: gathering the weights if it is the first to use them, and reducing the gradients if it completes them.

    `rank_actions` lists the rank's actions in order. `group_counts` maps a stage number to the number of its weight
    groups by kind: blocks, embedding, head, rest. `last_microbatch` is the number of the step's last micro-batch.
    """
    seconds_by_action = dict[Action, float]()
    gathered = set[tuple[int, str]]()
    for action in rank_actions:
        gathers = reduces = 0
        for kind, num in group_counts[action.stage].items():
            group = action.stage, kind
            is_used = action.kind is Kind.FORWARD if kind == "embedding" else action.kind is not Kind.WEIGHT
            if is_used and group not in gathered:
                gathers += num
                gathered.add(group)
            if zero_stage == 3 and (kind in ("blocks", "embedding") or action.kind is Kind.BACKWARD):
                gathered.discard(group)  # blocks and embedding are freed after each use, other groups after a backward
            reducing_half = Kind.INPUT if kind == "embedding" else Kind.WEIGHT
            if action.kind in (Kind.BACKWARD, reducing_half) and (
                zero_stage >= 2 or action.microbatch == last_microbatch
            ):
                reduces += num
        seconds_by_action[action] = gathers * seconds.gather + reduces * seconds.reduce
    return seconds_by_action
