"""What one rank of a run of ours holds, in bytes, by name: the same places and stages that build the model.

Called by whoever plans a run. Weights, gradients, masters and moments are exact; activations, logits and gathered
buffers are kept's closed forms, added up along the schedule's own row; both are compared with real processes in
tests/layouts. What only a GPU can tell is in NEED_A_GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from operator import add

from lmtrain.layout import Coordinate, Layout
from lmtrain.models.model_settings import ModelSettings
from lmtrain.optim.optim_settings import OptimSettings
from lmtrain.placement.memory import FP32_BYTES, Numbers, Weights, count, places_held, rank_bytes
from lmtrain.placement.stages import Stage
from lmtrain.plan.factors import fitted_memory
from lmtrain.plan.kept import Layers, kept_of
from lmtrain.plan.memory import GIB
from lmtrain.plan.ours import LOSS_BYTES, LOSS_NUMBERS, Planned
from lmtrain.schedules.pipeline_schedule import schedule_named
from lmtrain.schedules.table import Kind

NEED_A_GPU = ("communicators", "slack")  # fitted to published runs, not measured on ours

# (stage, microbatches that await its backward, those that await its second half), of each stage of a rank
Flying = tuple[tuple[int, int, int], ...]


def rank_bytes_of(run: Planned, rank: int) -> dict[str, int]:
    at = run.parallel.layout.coordinate(rank)
    stages = run.stages[at.pp]
    lasting = _lasting(run, stages, at)
    activations, logits = _most_kept(run, stages, at)
    working = _working(run, stages)
    found = lasting | {
        "activations": activations, "logits": logits, "working": working,
        "gathered": _gathered(run, stages), "messages": _messages(run),
    }  # fmt: skip
    needs_gpu = dict.fromkeys(NEED_A_GPU, 0.0)
    if run.compute.device != "cpu":
        factors = fitted_memory()
        needs_gpu["communicators"] = factors["base_GiB"] * GIB
        needs_gpu["slack"] = factors["slack"] * (activations + logits + working)
    return {name: round(size) for name, size in (found | needs_gpu).items()}


def fullest_rank(run: Planned) -> int:
    """The rank that holds most; the first of each stage has as much as any other of it."""
    layout = run.parallel.layout
    firsts = range(0, layout.world_size, layout.world_size // layout.pp)
    return max(firsts, key=lambda rank: sum(rank_bytes_of(run, rank).values()))


def _lasting(run: Planned, stages: Sequence[Stage], at: Coordinate) -> dict[str, float]:
    parallel, layout = run.parallel, run.parallel.layout
    by_layer = _by_layer(run.model, run.optim, layout.tp, layout.dp_shard, at.dp_shard)
    held = reduce(add, (by_layer.stage(stage) for stage in stages), Numbers())
    now = rank_bytes(held, layout, zero=parallel.zero, work_bytes=run.number_bytes)
    gradients = now.gradients
    if layout.dp > 1 and run.num_microbatches == 1:  # reduced as soon as they are made
        gradients = FP32_BYTES * held.shards
    elif parallel.zero == 2 and parallel.splits_backward:  # what first halves make waits for the second
        early = {stage.number: by_layer.stage(stage).early for stage in stages}
        gradients += FP32_BYTES * max(sum(early[s] for s, _, later in flying if later) for flying in _flying(run, at))
    return {"weights": now.work, "gradients": gradients, "masters": now.masters, "moments": now.optimizer}


@dataclass(frozen=True)
class ByLayer:
    """Numbers of each part of a model on one rank."""

    blocks: tuple[Numbers, ...]
    before: Numbers  # what the first stage has besides
    after: Numbers  # what the last has
    copies: Numbers  # of tied weights, in a last stage that is not the first

    def root(self, stage: Stage) -> Numbers:
        """What a stage has outside of its blocks."""
        found = self.before if stage.first else Numbers()
        found += self.after if stage.last else Numbers()
        return found + (self.copies if stage.last and not stage.first else Numbers())

    def stage(self, stage: Stage) -> Numbers:
        return reduce(add, (self.blocks[number] for number in stage.layers), self.root(stage))


@lru_cache(maxsize=256)
def _by_layer(model: ModelSettings, optim: OptimSettings, tp: int, dp_shard: int, shard: int) -> ByLayer:
    layout, weights = Layout(tp=tp, dp_shard=dp_shard), _weights(model)

    def numbers(layers: range, *, first: bool, last: bool) -> Numbers:
        stage = Stage(0, layers, first, last)
        return count(places_held(model, [stage], layout, shard, weights), layout, optim.num_slots)

    none = range(0)
    before, both = numbers(none, first=True, last=False), numbers(none, first=True, last=True)
    after = both - before
    copies = replace(numbers(none, first=False, last=True) - after, early=0)  # because: a copy is a head, a product
    alike: dict[tuple[object, ...], Numbers] = {}
    blocks = []
    for number, key in enumerate(_kinds_of_blocks(model, optim)):
        if key not in alike:
            alike[key] = numbers(range(number, number + 1), first=False, last=False)
        blocks.append(alike[key])
    return ByLayer(tuple(blocks), before, after, copies)


@lru_cache(maxsize=16)
def _weights(model: ModelSettings) -> Weights:
    return Weights.of(model)


@lru_cache(maxsize=16)
def _kinds_of_blocks(model: ModelSettings, optim: OptimSettings) -> tuple[tuple[object, ...], ...]:
    """Of each block: two that are equal hold equally much."""
    weights = _weights(model)
    found: list[list[object]] = [[] for _ in range(model.shape.num_layers)]
    for name, shape in weights.shapes.items():
        if 0 <= (layer := model.layer_of(name)) < len(found):
            found[layer].append((shape, weights.cuts.get(name), optim.num_slots(name, shape)))
    return tuple(map(tuple, found))


def _most_kept(run: Planned, stages: Sequence[Stage], at: Coordinate) -> tuple[float, float]:
    """The most of activations and of logits that lie there between two actions of this rank's row."""
    kept = {stage.number: kept_of(run, stage) for stage in stages}
    flying = _flying(run, at)
    return (
        max(sum(kept[s].hidden * waits + kept[s].later * later for s, waits, later in now) for now in flying),
        max(sum(kept[s].logits * (waits + later) for s, waits, later in now) for now in flying),
    )


def _flying(run: Planned, at: Coordinate) -> Iterable[Flying]:
    p = run.parallel
    return _in_flight(p.schedule, at.pp, p.pp, p.vp, run.num_microbatches) if p.pp > 1 else (((0, 1, 0),),)


@lru_cache(maxsize=4096)
def _in_flight(schedule: str, rank: int, pp: int, vp: int, count: int) -> frozenset[Flying]:
    """What occurs along a rank's row."""
    counts: dict[int, list[int]] = {}
    found = set()
    for action in schedule_named(schedule).row(rank, pp, vp, count):
        held = counts.setdefault(action.stage, [0, 0])
        match action.kind:
            case Kind.FORWARD:
                held[0] += 1
            case Kind.BACKWARD:
                held[0] -= 1
            case Kind.INPUT:
                held[0], held[1] = held[0] - 1, held[1] + 1
            case Kind.WEIGHT:
                held[1] -= 1
        if action.kind in (Kind.FORWARD, Kind.INPUT):  # the others only let go
            found.add(tuple((stage, waits, later) for stage, (waits, later) in counts.items()))
    return frozenset(found)


def _working(run: Planned, stages: Sequence[Stage]) -> float:
    """Of the action that needs most: a block's backward, with what it brings back, or the loss."""
    layers = Layers(run)
    blocks = {run.recomputes(number): layers.block(number) for stage in stages for number in stage.layers}
    back = max((layers.block_with("none") - kept for again, kept in blocks.items() if again), default=0.0)
    block = back + 2 * layers.whole + 2 * layers.up if blocks else 0.0
    if not any(stage.last for stage in stages):
        return layers.tokens * block
    logits = layers.tokens * layers.logits
    in_fp32 = 0 if run.compute.compile else min(logits / run.number_bytes, LOSS_NUMBERS) * LOSS_BYTES
    return max(layers.tokens * block, logits + in_fp32)


def _gathered(run: Planned, stages: Sequence[Stage]) -> float:
    """FSDP's: a buffer to gather in, one whose sum is shared out and its share, each as large as the largest group.

    zero 3 has besides the weights that are gathered at once: those outside of blocks, and a block.
    """
    layout = run.parallel.layout
    if layout.dp == 1:
        return 0.0
    by_layer = _by_layer(run.model, run.optim, layout.tp, layout.dp_shard, 0)
    roots = [by_layer.root(stage).shards for stage in stages]
    blocks = [by_layer.blocks[number].shards for stage in stages for number in stage.layers]
    largest, block = max(roots + blocks), max(blocks, default=0)
    shards = layout.dp_shard
    gathers = run.number_bytes if shards > 1 else 0  # one shard is the whole
    found = largest * (shards * (gathers + FP32_BYTES) + FP32_BYTES)
    whole = shards * (sum(roots) + block) * run.number_bytes if run.parallel.zero == 3 else 0
    return float(found + whole)


def _messages(run: Planned) -> float:
    """To and from the two neighbours: two that are expected and two on their way (parallel.pipeline.messages)."""
    if run.parallel.pp == 1:
        return 0.0
    layers = Layers(run)
    return 8 * layers.tokens * layers.whole / run.parallel.tp
