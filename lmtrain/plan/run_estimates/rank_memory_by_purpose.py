"""Bytes that a rank of a run holds, by purpose, from the same placements and stages that build the model.

Called by planning code. Weights, gradients, masters and moments are exact; activations, logits and gathered buffers use
placement's closed forms, added up along the rank's list of pipeline actions; tests/layouts compare both with real
processes. Purposes that only a GPU can show are in NEED_A_GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import pairwise
from operator import add

import numpy as np
from numpy.typing import NDArray

from lmtrain.layout import Coordinate, Layout
from lmtrain.models.model_settings import ModelSettings
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.placement.attention_activation_bytes import FP32_BYTES
from lmtrain.placement.layers_and_shards_of_ranks import Stage
from lmtrain.placement.weight_and_activation_bytes import (
    ElementCounts,
    count_elements,
    placements_of_stages,
    rank_bytes,
    shapes_and_cuts,
)
from lmtrain.plan.cost_model.hardware_figures import fitted_memory_factors
from lmtrain.plan.run_estimates.closed_form_memory import GIB
from lmtrain.plan.run_estimates.workload_from_settings import LOSS_NUMBERS, PlannedRun
from lmtrain.schedules.pipeline_schedule import schedule_named
from lmtrain.schedules.table import Kind
from lmtrain.spec import Split

NEED_A_GPU = ("communicators", "slack")  # fitted to published runs, not measured on ours


@dataclass(frozen=True)
class InFlight:
    """Micro-batches in flight on a rank: each row is a point in time, each column a stage of the rank."""

    awaiting_backward: NDArray[np.int64]  # micro-batches that await their backward in the stage
    awaiting_weight_half: NDArray[np.int64]  # micro-batches that await the second half of their backward


_SINGLE_MICROBATCH = InFlight(np.array([[1]]), np.array([[0]]))  # a single micro-batch if there is no pipeline


def count_rank_bytes(run: PlannedRun, rank: int) -> dict[str, int]:
    """Return the peak memory of rank number `rank` as a dict from purpose to bytes. Purposes are weights, gradients,
    masters (fp32 copies of weights), moments, average, activations, logits, working, gathered, messages, communicators
    and slack.

    The last two are the purposes in NEED_A_GPU; they are 0 on a CPU.
    """
    coordinate = run.parallel.layout.coordinate(rank)
    stages = run.stages[coordinate.pp]
    activations, logits = _peak_activation_bytes(run, stages, coordinate)
    working = _working_bytes(run, stages)
    sizes = _state_bytes(run, stages, coordinate) | {
        "activations": activations, "logits": logits, "working": working,
        "gathered": _gathered_bytes(run, stages, coordinate),
        # to and from the two neighbours: two posted receives and two sends in flight (parallel/pipeline)
        "messages": 8 * run.layers.tokens * run.layers.whole / run.parallel.tp if run.parallel.pp > 1 else 0.0,
    } | dict.fromkeys(NEED_A_GPU, 0.0)  # fmt: skip
    if not run.on_cpu:
        factors = fitted_memory_factors()
        sizes |= {
            "communicators": factors["base_GiB"] * GIB,
            "slack": factors["slack"] * (activations + logits + working),
        }
    return {name: round(size) for name, size in sizes.items()}


def fullest_rank(run: PlannedRun) -> int:
    """Return the global number of the rank whose peak memory is the largest, by `count_rank_bytes`.

    Only the first rank of each stage is compared, since no other rank of the stage holds more.
    """
    layout = run.parallel.layout
    firsts = range(0, layout.world_size, layout.world_size // layout.pp)
    return max(firsts, key=lambda rank: sum(count_rank_bytes(run, rank).values()))


def _state_bytes(run: PlannedRun, stages: Sequence[Stage], coordinate: Coordinate) -> dict[str, float]:
    """Return five sizes in bytes on the rank at `coordinate`, whose pipeline stages are `stages`, under the keys
    weights, gradients, masters (fp32 copies of weights), moments (all tensors of the optimizer) and average (an average
    of the weights).
    """
    parallel, layout = run.parallel, run.parallel.layout
    by_part = _count_elements_by_part(run.model, run.optim, layout.tp, layout.dp_shard, coordinate.dp_shard)
    numbers = reduce(add, (by_part.of_stage(stage) for stage in stages), ElementCounts())
    state = rank_bytes(
        numbers, layout, zero=parallel.zero, work_bytes=run.number_bytes, keeps_average=run.average_every_steps > 0
    )
    gradients = state.gradients
    if layout.dp > 1 and run.num_microbatches == 1:  # because: they are reduced as soon as they are computed
        gradients = FP32_BYTES * numbers.shards
    elif parallel.zero == 2 and parallel.splits_backward:  # first halves' gradients wait for the second
        early_gradients = [by_part.num_early_gradients(stage, tied=bool(run.model.ties())) for stage in stages]
        gradients += FP32_BYTES * int(
            np.max((_in_flight_of_run(run, coordinate).awaiting_weight_half > 0) @ early_gradients)
        )
    return {
        "weights": state.work, "gradients": gradients, "masters": state.masters, "moments": state.optimizer,
        "average": state.average,
    }  # fmt: skip


@dataclass(frozen=True)
class ElementCountsByPart:
    """Numbers of weights, gradients and optimizer values that a rank holds in each part of a model."""

    blocks: tuple[ElementCounts, ...]
    first_stage_rest: ElementCounts  # parts of the first stage other than blocks
    last_stage_rest: ElementCounts  # parts of the last stage other than blocks
    tied_copies: ElementCounts  # copies of tied weights, in a last stage that is not also the first
    embedding_table: ElementCounts  # the embedding table, included in `first_stage_rest`
    head_table: ElementCounts  # the head's table, included in `last_stage_rest` or in `tied_copies`

    def outside_blocks(self, stage: Stage) -> ElementCounts:
        """Return the counts of weights and optimizer values of a pipeline stage outside of its transformer blocks: of
        the embedding if it is the first stage, of the final norm and head if it is the last.
        """
        last_rest = self.last_stage_rest if stage.first else self.last_stage_rest + self.tied_copies
        first_rest = self.first_stage_rest if stage.first else ElementCounts()
        return first_rest + (last_rest if stage.last else ElementCounts())

    def tables(self, stage: Stage, *, tied: bool) -> tuple[ElementCounts, ElementCounts]:
        """Return the element counts of a pipeline stage's embedding table and of its output head table, which FSDP
        gathers separately. A stage without a table has empty counts for it. Both are empty if the stage has both tables
        and they are one tied weight.
        """
        if stage.first and stage.last and tied:
            return ElementCounts(), ElementCounts()
        none = ElementCounts()
        return self.embedding_table if stage.first else none, self.head_table if stage.last else none

    def num_early_gradients(self, stage: Stage, *, tied: bool) -> int:
        """Return how many gradients a split backward (zero-bubble schedules) computes in its first half and holds until
        its second half: all but the embedding table's.
        """
        return self.of_stage(stage).early - self.tables(stage, tied=tied)[0].early

    def of_stage(self, stage: Stage) -> ElementCounts:
        """Count the weights, gradients and optimizer values of a whole stage: its blocks, and what it holds outside of
        them.
        """
        return reduce(add, (self.blocks[block] for block in stage.layers), self.outside_blocks(stage))


@lru_cache(maxsize=256)
def _count_elements_by_part(
    model: ModelSettings, optim: OptimSettings, tp: int, dp_shard: int, shard_index: int
) -> ElementCountsByPart:
    """Count the elements of weights, gradients and optimizer state of each part of a model (blocks, embedding, head,
    ...) on one rank. The rank holds shard number `shard_index` of `dp_shard`, and a `tp`-th of each weight that is
    split by tensor parallelism.
    """
    layout, (_, cuts) = Layout(tp=tp, dp_shard=dp_shard), shapes_and_cuts(model)
    tables = {name.rpartition(".")[0] for name, cut in cuts.items() if cut.split is Split.VOCAB}

    def numbers(layers: range, *, is_first: bool, is_last: bool, tables_only: bool = False) -> ElementCounts:
        places = placements_of_stages(model, [Stage(0, layers, is_first, is_last)], layout, shard_index)
        chosen = [place for place in places if not tables_only or place.name.rpartition(".")[0] in tables]
        return count_elements(chosen, layout, optim.num_slots)

    no_blocks = range(0)
    before, both_ends = (
        numbers(no_blocks, is_first=True, is_last=False),
        numbers(no_blocks, is_first=True, is_last=True),
    )
    after = both_ends - before
    # because: a copy serves as head, a product, whose weight gradient is computed in the second half
    copies = replace(numbers(no_blocks, is_first=False, is_last=True) - after, early=0)
    kinds = _block_kinds(model, optim)
    example_of = {kind: number for number, kind in enumerate(kinds)}
    numbers_of_kind = {
        kind: numbers(range(at, at + 1), is_first=False, is_last=False) for kind, at in example_of.items()
    }
    return ElementCountsByPart(
        tuple(numbers_of_kind[kind] for kind in kinds), before, after, copies,
        embedding_table=numbers(no_blocks, is_first=True, is_last=False, tables_only=True),
        head_table=numbers(no_blocks, is_first=False, is_last=True, tables_only=True),
    )  # fmt: skip


@lru_cache(maxsize=16)
def _block_kinds(model: ModelSettings, optim: OptimSettings) -> tuple[tuple[object, ...], ...]:
    """Return a hashable key for each transformer block of the model, in order; blocks with equal keys have weights of
    equal shapes, tensor-parallel splits and numbers of optimizer tensors, and so need equal memory.
    """
    shapes, cuts = shapes_and_cuts(model)
    kinds: list[list[object]] = [[] for _ in range(model.shape.num_layers)]
    for name, shape in shapes.items():
        if 0 <= (layer := model.layer_of(name)) < len(kinds):
            kinds[layer].append((shape, cuts.get(name), optim.num_slots(name, shape)))
    return tuple(map(tuple, kinds))


def _peak_activation_bytes(run: PlannedRun, stages: Sequence[Stage], coordinate: Coordinate) -> tuple[float, float]:
    """Return the peak bytes of activations and the peak bytes of logits that the rank at `coordinate` holds in the
    course of a training step. `stages` are the rank's pipeline stages.
    """
    kept_by_stage = [run.layers.activation_bytes(stage) for stage in stages]
    in_flight = _in_flight_of_run(run, coordinate)
    hidden = [kept.hidden for kept in kept_by_stage]
    deferred = [kept.deferred for kept in kept_by_stage]
    logits = [kept.logits for kept in kept_by_stage]
    return (
        float(np.max(in_flight.awaiting_backward @ hidden + in_flight.awaiting_weight_half @ deferred)),
        float(np.max((in_flight.awaiting_backward + in_flight.awaiting_weight_half) @ logits)),
    )


def _in_flight_of_run(run: PlannedRun, coordinate: Coordinate) -> InFlight:
    """Return all combinations of numbers of micro-batches that the rank at `coordinate` has in flight in its pipeline
    stages in the course of a training step.
    """
    p = run.parallel
    return (
        _in_flight_of_schedule(p.schedule, coordinate.pp, p.pp, p.vp, run.num_microbatches)
        if p.pp > 1
        else _SINGLE_MICROBATCH
    )


@lru_cache(maxsize=4096)
def _in_flight_of_schedule(schedule: str, rank: int, pp: int, vp: int, num_microbatches: int) -> InFlight:
    """Return all distinct combinations of numbers of micro-batches that pipeline rank `rank` has in flight in the
    course of a training step: for each of its `vp` stages, those awaiting a backward and those awaiting the weight half
    of a split backward.

    For many micro-batches, return those of a short step if a step with pp more micro-batches adds no combination.
    """
    short_count = 4 * pp
    if num_microbatches > short_count + pp and num_microbatches % pp == 0:
        of_short, of_longer = (
            _in_flight_of_schedule(schedule, rank, pp, vp, count) for count in (short_count, short_count + pp)
        )
        if np.array_equal(of_short.awaiting_backward, of_longer.awaiting_backward) and np.array_equal(
            of_short.awaiting_weight_half, of_longer.awaiting_weight_half
        ):
            return of_short
    pipeline = schedule_named(schedule)
    stages = [stage for stage, owner in enumerate(pipeline.ranks_of_stages(pp, vp)) if owner == rank]
    awaiting, deferred = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    states = set()
    for kind, stage, _ in pipeline.row(rank, pp, vp, num_microbatches):
        awaiting[stage] += 1 if kind is Kind.FORWARD else -1 if kind is not Kind.WEIGHT else 0
        deferred[stage] += 1 if kind is Kind.INPUT else -1 if kind is Kind.WEIGHT else 0
        if kind in (Kind.FORWARD, Kind.INPUT):  # because: other actions only reduce the counts
            states.add((*awaiting.values(), *deferred.values()))
    table = np.array(sorted(states))
    return InFlight(table[:, : len(stages)], table[:, len(stages) :])


def _working_bytes(run: PlannedRun, stages: Sequence[Stage]) -> float:
    """Return the bytes of temporary tensors at the moment of a training step that needs most, on a rank with the
    pipeline stages `stages`: during the backward of one block with its recomputed activations, or during the loss.
    """
    layers = run.layers
    kinds = run.model.layer_kinds
    blocks = {(run.recompute_kind(number), kinds[number]) for stage in stages for number in stage.layers}
    recomputed = max(
        (layers.block_bytes("none", kind) - layers.block_bytes(recompute, kind) for recompute, kind in blocks),
        default=0.0,
    )
    block = recomputed + 2 * layers.whole + 2 * layers.up if blocks else 0.0
    if not any(stage.last for stage in stages):
        return layers.tokens * block
    logits = layers.tokens * layers.logits
    # because: the loss overwrites the logits on a GPU, but not those before they were scaled or capped
    gradient = logits * (run.on_cpu + layers.scales_logits)
    return max(layers.tokens * block, gradient + min(logits / run.number_bytes, LOSS_NUMBERS) * run.loss_bytes)


def _gathered_bytes(run: PlannedRun, stages: Sequence[Stage], coordinate: Coordinate) -> float:
    """Return the bytes of FSDP's buffers on the rank at `coordinate`, whose pipeline stages are `stages`: for gathered
    weights, and for the input and output of reducing gradients. Return 0 without data parallelism.

    Each is as large as the largest group. zero 3 adds the weights that are gathered at once: those outside of blocks
    and tables, and a block or a table; a head stays gathered until its backward.
    """
    p, layout, tied = run.parallel, run.parallel.layout, bool(run.model.ties())
    if layout.dp == 1:
        return 0.0
    by_part = _count_elements_by_part(run.model, run.optim, layout.tp, layout.dp_shard, 0)
    tables = [by_part.tables(stage, tied=tied) for stage in stages]
    rest_sizes = [
        (by_part.outside_blocks(s) - embedding - head).shards
        for s, (embedding, head) in zip(stages, tables, strict=True)
    ]
    head = sum(table.shards for _, table in tables)
    group_sizes = [by_part.blocks[number].shards for stage in stages for number in stage.layers]
    group_sizes += [table.shards for table, _ in tables]
    shards = layout.dp_shard
    gathers = run.number_bytes if shards > 1 else 0  # because: a single shard needs no gather
    buffers = max(rest_sizes + group_sizes + [head]) * (shards * (gathers + FP32_BYTES) + FP32_BYTES)
    if p.zero < 3:
        return float(buffers)
    head_stays = head > 0 and p.pp > 1 and _is_head_delayed(p.schedule, coordinate.pp, p.pp, p.vp, run.num_microbatches)
    at_once = head + max(group_sizes) if head_stays else max(*group_sizes, head)
    return float(buffers + shards * (sum(rest_sizes) + at_once) * run.number_bytes)


def count_weight_groups(run: PlannedRun, stage: Stage) -> dict[str, int]:
    """Return how many units of weights FSDP gathers and reduces separately in a pipeline stage, as a dict with the keys
    "blocks" (the number of blocks), "embedding", "head" and "rest" (0 or 1 each).
    """
    by_part = _count_elements_by_part(run.model, run.optim, run.parallel.layout.tp, run.parallel.layout.dp_shard, 0)
    embedding, head = by_part.tables(stage, tied=bool(run.model.ties()))
    kinds = {"embedding": embedding, "head": head, "rest": by_part.outside_blocks(stage) - embedding - head}
    return {"blocks": len(stage.layers)} | {kind: int(numbers.parts > 0) for kind, numbers in kinds.items()}


@lru_cache(maxsize=4096)
def _is_head_delayed(schedule: str, rank: int, pp: int, vp: int, num_microbatches: int) -> bool:
    """Return True if, for any micro-batch, pipeline rank `rank` runs another action between the forward and the
    backward of the last stage, so that the weights of the output head stay gathered in between.
    """
    last = pp * vp - 1
    return any(
        action.stage == last
        and action.kind is Kind.FORWARD
        and (following.stage, following.microbatch) != (last, action.microbatch)
        for action, following in pairwise(schedule_named(schedule).row(rank, pp, vp, num_microbatches))
    )
