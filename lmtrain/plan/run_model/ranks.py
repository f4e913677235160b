"""Bytes that a rank of our own runs holds, by name, from the same placements and stages that build the model.

Called by planning code. Weights, gradients, masters and moments are exact; activations, logits and gathered buffers use
placement's closed forms, added up along the schedule's own row; tests/layouts compare both with real processes. Parts
that only a GPU can show are in NEED_A_GPU.
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
from lmtrain.placement.memory import FP32_BYTES, Numbers, Weights, count, places_held, rank_bytes
from lmtrain.placement.places import Stage
from lmtrain.plan.price.hardware import fitted_memory
from lmtrain.plan.run_model.memory import GIB
from lmtrain.plan.run_model.run import LOSS_NUMBERS, Planned
from lmtrain.schedules.pipeline_schedule import schedule_named
from lmtrain.schedules.table import Kind
from lmtrain.spec import Split

NEED_A_GPU = ("communicators", "slack")  # fitted to published runs, not measured on ours


@dataclass(frozen=True)
class Flying:
    """Micro-batches in flight on a rank: each row is a point in time, each column a stage of the rank."""

    waits: NDArray[np.int64]  # micro-batches that await their backward in the stage
    later: NDArray[np.int64]  # micro-batches that await the second half of their backward


_ONE = Flying(np.array([[1]]), np.array([[0]]))  # a single micro-batch if there is no pipeline


def rank_bytes_of(run: Planned, rank: int) -> dict[str, int]:
    at = run.parallel.layout.coordinate(rank)
    stages = run.stages[at.pp]
    activations, logits = _most_kept(run, stages, at)
    working = _working(run, stages)
    found = _lasting(run, stages, at) | {
        "activations": activations, "logits": logits, "working": working, "gathered": _gathered(run, stages, at),
        # to and from the two neighbours: two posted receives and two sends in flight (parallel.pipeline.messages)
        "messages": 8 * run.layers.tokens * run.layers.whole / run.parallel.tp if run.parallel.pp > 1 else 0.0,
    } | dict.fromkeys(NEED_A_GPU, 0.0)  # fmt: skip
    if not run.on_cpu:
        factors = fitted_memory()
        found |= {
            "communicators": factors["base_GiB"] * GIB,
            "slack": factors["slack"] * (activations + logits + working),
        }
    return {name: round(size) for name, size in found.items()}


def fullest_rank(run: Planned) -> int:
    """Return the rank that holds most.

    Only the first rank of each stage is compared, since no other rank of the stage holds more.
    """
    layout = run.parallel.layout
    firsts = range(0, layout.world_size, layout.world_size // layout.pp)
    return max(firsts, key=lambda rank: sum(rank_bytes_of(run, rank).values()))


def _lasting(run: Planned, stages: Sequence[Stage], at: Coordinate) -> dict[str, float]:
    parallel, layout = run.parallel, run.parallel.layout
    by_layer = _by_layer(run.model, run.optim, layout.tp, layout.dp_shard, at.dp_shard)
    held = reduce(add, (by_layer.stage(stage) for stage in stages), Numbers())
    now = rank_bytes(held, layout, zero=parallel.zero, work_bytes=run.number_bytes)
    gradients = now.gradients
    if layout.dp > 1 and run.num_microbatches == 1:  # because: they are reduced as soon as they are computed
        gradients = FP32_BYTES * held.shards
    elif parallel.zero == 2 and parallel.splits_backward:  # first halves' gradients wait for the second
        early = [by_layer.early(stage, tied=bool(run.model.ties())) for stage in stages]
        gradients += FP32_BYTES * int(np.max((_flying(run, at).later > 0) @ early))
    return {"weights": now.work, "gradients": gradients, "masters": now.masters, "moments": now.optimizer}


@dataclass(frozen=True)
class ByLayer:
    """Numbers of each part of a model on a rank."""

    blocks: tuple[Numbers, ...]
    before: Numbers  # parts of the first stage other than blocks
    after: Numbers  # parts of the last stage other than blocks
    copies: Numbers  # copies of tied weights, in a last stage that is not also the first
    read: Numbers  # the embedding table, included in `before`
    scored: Numbers  # the head's table, included in `after` or in `copies`

    def root(self, stage: Stage) -> Numbers:
        """Return the numbers of a stage outside of its blocks."""
        at_end = self.after if stage.first else self.after + self.copies
        return (self.before if stage.first else Numbers()) + (at_end if stage.last else Numbers())

    def tables(self, stage: Stage, *, tied: bool) -> tuple[Numbers, Numbers]:
        """Return the embedding's and the head's tables, gathered separately; none if they are the same tensor."""
        if stage.first and stage.last and tied:
            return Numbers(), Numbers()
        return self.read if stage.first else Numbers(), self.scored if stage.last else Numbers()

    def early(self, stage: Stage, *, tied: bool) -> int:
        """Return how many gradients of first halves are held until the second: all but the embedding table's."""
        return self.stage(stage).early - self.tables(stage, tied=tied)[0].early

    def stage(self, stage: Stage) -> Numbers:
        return reduce(add, (self.blocks[number] for number in stage.layers), self.root(stage))


@lru_cache(maxsize=256)
def _by_layer(model: ModelSettings, optim: OptimSettings, tp: int, dp_shard: int, shard: int) -> ByLayer:
    layout, weights = Layout(tp=tp, dp_shard=dp_shard), _weights(model)

    tables = {name.rpartition(".")[0] for name, cut in weights.cuts.items() if cut.split is Split.VOCAB}

    def numbers(layers: range, *, first: bool, last: bool, alone: bool = False) -> Numbers:
        places = places_held(model, [Stage(0, layers, first, last)], layout, shard, weights)
        kept = [place for place in places if not alone or place.name.rpartition(".")[0] in tables]
        return count(kept, layout, optim.num_slots)

    none = range(0)
    before, both = numbers(none, first=True, last=False), numbers(none, first=True, last=True)
    after = both - before
    # because: a copy serves as head, a product, whose weight gradient is computed in the second half
    copies = replace(numbers(none, first=False, last=True) - after, early=0)
    kinds = _kinds_of_blocks(model, optim)
    one_of = {kind: number for number, kind in enumerate(kinds)}
    alike = {kind: numbers(range(at, at + 1), first=False, last=False) for kind, at in one_of.items()}
    return ByLayer(
        tuple(alike[kind] for kind in kinds), before, after, copies,
        read=numbers(none, first=True, last=False, alone=True),
        scored=numbers(none, first=False, last=True, alone=True),
    )  # fmt: skip


@lru_cache(maxsize=16)
def _weights(model: ModelSettings) -> Weights:
    return Weights.of(model)


@lru_cache(maxsize=16)
def _kinds_of_blocks(model: ModelSettings, optim: OptimSettings) -> tuple[tuple[object, ...], ...]:
    """Return a key for each block; blocks with equal keys hold equally much."""
    weights = _weights(model)
    found: list[list[object]] = [[] for _ in range(model.shape.num_layers)]
    for name, shape in weights.shapes.items():
        if 0 <= (layer := model.layer_of(name)) < len(found):
            found[layer].append((shape, weights.cuts.get(name), optim.num_slots(name, shape)))
    return tuple(map(tuple, found))


def _most_kept(run: Planned, stages: Sequence[Stage], at: Coordinate) -> tuple[float, float]:
    """Return the largest bytes of activations and of logits at any point of this rank's row."""
    kept, flying = [run.layers.kept(stage) for stage in stages], _flying(run, at)
    hidden, later, logits = ([getattr(one, name) for one in kept] for name in ("hidden", "later", "logits"))
    return (
        float(np.max(flying.waits @ hidden + flying.later @ later)),
        float(np.max((flying.waits + flying.later) @ logits)),
    )


def _flying(run: Planned, at: Coordinate) -> Flying:
    p = run.parallel
    return _in_flight(p.schedule, at.pp, p.pp, p.vp, run.num_microbatches) if p.pp > 1 else _ONE


@lru_cache(maxsize=4096)
def _in_flight(schedule: str, rank: int, pp: int, vp: int, count: int) -> Flying:
    """Return the distinct combinations of micro-batches in flight along a rank's schedule row.

    For many micro-batches, return those of a short row if a row with pp more micro-batches adds no combination.
    """
    few = 4 * pp
    if count > few + pp and count % pp == 0:
        of_few, of_more = (_in_flight(schedule, rank, pp, vp, num) for num in (few, few + pp))
        if np.array_equal(of_few.waits, of_more.waits) and np.array_equal(of_few.later, of_more.later):
            return of_few
    pipeline = schedule_named(schedule)
    stages = [stage for stage, owner in enumerate(pipeline.ranks_of_stages(pp, vp)) if owner == rank]
    waits, later = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    found = set()
    for kind, stage, _ in pipeline.row(rank, pp, vp, count):
        waits[stage] += 1 if kind is Kind.FORWARD else -1 if kind is not Kind.WEIGHT else 0
        later[stage] += 1 if kind is Kind.INPUT else -1 if kind is Kind.WEIGHT else 0
        if kind in (Kind.FORWARD, Kind.INPUT):  # because: other actions only reduce the counts
            found.add((*waits.values(), *later.values()))
    table = np.array(sorted(found))
    return Flying(table[:, : len(stages)], table[:, len(stages) :])


def _working(run: Planned, stages: Sequence[Stage]) -> float:
    """Return bytes of the most demanding action: a block's backward with its recomputed activations, or the loss."""
    layers = run.layers
    blocks = {run.again(number) for stage in stages for number in stage.layers}
    back = max((layers.block_with("none") - layers.block_with(again) for again in blocks), default=0.0)
    block = back + 2 * layers.whole + 2 * layers.up if blocks else 0.0
    if not any(stage.last for stage in stages):
        return layers.tokens * block
    logits = layers.tokens * layers.logits
    gradient = logits if run.on_cpu else 0.0
    return max(layers.tokens * block, gradient + min(logits / run.number_bytes, LOSS_NUMBERS) * run.loss_bytes)


def _gathered(run: Planned, stages: Sequence[Stage], at: Coordinate) -> float:
    """Return bytes of FSDP's buffers: a gather buffer, a reduce-scatter input and its output.

    Each is as large as the largest group. zero 3 adds the weights that are gathered at once: those outside of blocks
    and tables, and a block or a table; a head stays gathered until its backward.
    """
    p, layout, tied = run.parallel, run.parallel.layout, bool(run.model.ties())
    if layout.dp == 1:
        return 0.0
    by_layer = _by_layer(run.model, run.optim, layout.tp, layout.dp_shard, 0)
    tables = [by_layer.tables(stage, tied=tied) for stage in stages]
    roots = [(by_layer.root(s) - read - scored).shards for s, (read, scored) in zip(stages, tables, strict=True)]
    scored = sum(table.shards for _, table in tables)
    in_turn = [by_layer.blocks[number].shards for stage in stages for number in stage.layers]
    in_turn += [table.shards for table, _ in tables]
    shards = layout.dp_shard
    gathers = run.number_bytes if shards > 1 else 0  # because: a single shard needs no gather
    found = max(roots + in_turn + [scored]) * (shards * (gathers + FP32_BYTES) + FP32_BYTES)
    if p.zero < 3:
        return float(found)
    stays = scored > 0 and p.pp > 1 and _head_waits(p.schedule, at.pp, p.pp, p.vp, run.num_microbatches)
    at_once = scored + max(in_turn) if stays else max(*in_turn, scored)
    return float(found + shards * (sum(roots) + at_once) * run.number_bytes)


def groups_of(run: Planned, stage: Stage) -> dict[str, int]:
    """Return how many weight groups of each kind a stage has; a group is gathered and reduced as a unit."""
    by_layer = _by_layer(run.model, run.optim, run.parallel.layout.tp, run.parallel.layout.dp_shard, 0)
    read, scored = by_layer.tables(stage, tied=bool(run.model.ties()))
    kinds = {"embedding": read, "head": scored, "rest": by_layer.root(stage) - read - scored}
    return {"blocks": len(stage.layers)} | {kind: int(numbers.parts > 0) for kind, numbers in kinds.items()}


@lru_cache(maxsize=4096)
def _head_waits(schedule: str, rank: int, pp: int, vp: int, count: int) -> bool:
    """Return whether a rank of the last stage does other work between its head's forward and backward."""
    last = pp * vp - 1
    return any(
        one.stage == last and one.kind is Kind.FORWARD and (then.stage, then.microbatch) != (last, one.microbatch)
        for one, then in pairwise(schedule_named(schedule).row(rank, pp, vp, count))
    )
