"""Predictions for single layouts: the parts of a step's time, its simulation, the fullest rank's memory, token costs.

Also the curve over numbers of devices: the best layout at each number, searched anew, and the previous number's layout
carried over to it. Called by `lmtrain plan` for the few layouts that are shown. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from lmtrain.plan.cost_model.hardware_figures import Hardware
from lmtrain.plan.cost_model.step_time_and_energy import StepTime, watts
from lmtrain.plan.run_estimates.rank_memory_by_purpose import count_rank_bytes, fullest_rank
from lmtrain.plan.run_estimates.simulate_pipeline import OperationSeconds, price_runs, replay_step
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun
from lmtrain.plan.search.legal_layouts import FixedSettings, Indices, legal_layouts
from lmtrain.plan.search.order_layouts_by_speed import CostModel, LayoutLimits, RankedLayouts, rank_layouts
from lmtrain.schedules.schedule_simulator import Timeline

STEP_PARTS = {  # disjoint parts of a step's time
    "compute": "computation",
    "tp": "tensor parallelism's collectives",
    "sends": "the pipeline's messages",
    "bubble": "the pipeline's bubble",
    "sharded": "gathering sharded weights",
    "reduce": "summing gradients",
    "update": "the optimizer",
    "fixed": "the host",
    "stragglers": "waiting for the slowest",
}
_COMMUNICATION_PARTS = ("tp", "sends", "sharded", "reduce")


@dataclass(frozen=True)
class LayoutResult:
    """The predicted time, memory and energy of a run in one layout."""

    run: PlannedRun
    hardware: Hardware
    parts: dict[str, float]  # name in STEP_PARTS -> seconds
    rank: int  # the fullest rank
    watts: float  # power of a device
    interval: float  # half-width of the 80% interval
    microbatch: OperationSeconds  # durations of single operations, per micro-batch and block

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return self.run.parallel.layout.world_size

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return sum(self.parts.values())

    @property
    def interval_s(self) -> tuple[float, float]:
        """Lower and upper end of the 80% interval of the step time, in seconds."""
        return self.seconds / (1 + self.interval), self.seconds * (1 + self.interval)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Purpose (weights, activations, ...) -> bytes, on the fullest rank."""
        return count_rank_bytes(self.run, self.rank)

    @property
    def total_bytes(self) -> int:
        """Bytes on the fullest rank."""
        return sum(self.memory.values())

    @property
    def tokens_per_step(self) -> int:
        return self.run.global_batch * self.run.shape.seq_len

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization as a run counts it: full attention, no recompute, relative to the peak FLOP/s."""
        flops = self.run.shape.flops_per_token(scored_share=self.run.scored_share) * self.tokens_per_s
        return flops / (self.gpus * self.hardware.peak(self.run.product_precision))

    @property
    def bubble_share(self) -> float:
        """Share of a step that is pipeline bubble."""
        return self.parts["bubble"] / self.seconds

    @property
    def exposed_share(self) -> float:
        """Share of a step in which communication is not overlapped by computation."""
        return sum(self.parts[name] for name in _COMMUNICATION_PARTS) / self.seconds

    @property
    def joules_per_token(self) -> float:
        return self.watts * self.gpus / self.tokens_per_s

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as a dict of JSON values, in the form that `lmtrain plan --json` prints."""
        names = ("pp", "vp", "dp_replicate", "dp_shard", "tp", "zero", "sequence_parallel", "schedule", "balance")
        return {
            "parallel": {name: getattr(self.run.parallel, name) for name in names},
            "micro_batch": self.run.micro_batch, "recompute": self.run.recompute.kind,
            "recompute_blocks": getattr(self.run.recompute, "blocks", None),
            "precision": self.run.precision.kind, "gpus": self.gpus, "step_s": self.seconds,
            "step_s_80_percent": list(self.interval_s), "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s / self.gpus, "mfu": self.mfu, "bubble": self.bubble_share,
            "exposed_communication": self.exposed_share, "parts_s": self.parts, "memory_bytes": self.memory,
            "held_bytes": self.total_bytes, "room_bytes": self.hardware.memory_bytes, "fullest_rank": self.rank,
            "watts_per_gpu": self.watts,
            "joules_per_token": self.joules_per_token,
        }  # fmt: skip


def simulate_step(layout: LayoutResult) -> tuple[Timeline, str]:
    """Simulate one training step of the layout's pipeline, with at most 2 * pp micro-batches. Return its timeline, and
    a note to print if the run has more micro-batches than were simulated, else "".
    """
    num_microbatches = layout.run.num_microbatches
    count = min(num_microbatches, 2 * layout.run.parallel.pp)
    note = f", shown with {count} of {num_microbatches} microbatches" * (count < num_microbatches)
    return replay_step(layout.run, layout.microbatch, count), note


def results_at(ranked: RankedLayouts, indices: Iterable[int]) -> list[LayoutResult]:
    """Predict time, memory and energy of the layouts at these indices of the ranking, in order."""
    return price_layouts([ranked.run_at(index) for index in indices], ranked.hardware, ranked.cost_model)


def price_layouts(runs: Sequence[PlannedRun], hardware: Hardware, cost_model: CostModel) -> list[LayoutResult]:
    """Predict step time, memory and energy of each run, in the layout that it has, on this machine. Return a result for
    each run, in the same order.
    """
    if not runs:
        return []
    time, seconds = price_runs(runs, hardware, cost_model.time)
    power = watts(time, hardware)
    return [
        LayoutResult(
            run,
            hardware,
            _step_parts(time, index),
            fullest_rank(run),
            float(power[index]),
            cost_model.interval,
            seconds[index],
        )
        for index, run in enumerate(runs)
    ]


def _step_parts(time: StepTime, index: int) -> dict[str, float]:
    """Return the seconds of a step by part, with the keys of STEP_PARTS (compute, bubble, reduce, ...), for the run at
    position `index` in `time`. Their sum is the whole step.
    """
    parts = {name: float(getattr(time, name)[index]) for name in STEP_PARTS}
    # because: the busiest rank's time includes all three
    return parts | {"compute": parts["compute"] - parts["tp"] - parts["sends"]}


def excess_share(layout: LayoutResult, best: LayoutResult, objective: str) -> float:
    """Return how much more a layout needs than the best one, as a share: 0.1 is 10% more. Compared are joules per token
    if `objective` is "joules", otherwise the seconds of a step.
    """
    return (
        layout.joules_per_token / best.joules_per_token - 1
        if objective == "joules"
        else layout.seconds / best.seconds - 1
    )


def why_slower(layout: LayoutResult, best: LayoutResult) -> str:
    """Return a phrase that names the part of a step in which `layout` loses most time against `best`, such as "the
    pipeline's bubble +1.2 s". It also names the part in which it gains most if that is over 5% of the loss.
    """
    increases = {name: layout.parts[name] - best.parts[name] for name in STEP_PARTS}
    largest = max(increases, key=lambda name: increases[name])
    smallest = min(increases, key=lambda name: increases[name])
    loss = f"{STEP_PARTS[largest]} {_signed(increases[largest])}"
    return (
        f"{loss}, {STEP_PARTS[smallest]} {_signed(increases[smallest])}"
        if increases[smallest] < -0.05 * increases[largest]
        else loss
    )


def _signed(seconds: float) -> str:
    """Format a difference in seconds with its sign: "+1.2 s" or "-35 ms"."""
    return f"{seconds:+.3g} s" if abs(seconds) >= 1 else f"{1000 * seconds:+.3g} ms"


def best_by_pp_and_tp(ranked: RankedLayouts) -> dict[tuple[int, int], LayoutResult | float]:
    """Return a dict with a value for each pair of sizes (pp, tp): the fastest layout that fits in memory. If none fits,
    the value is the number of bytes that the smallest one needs on its fullest rank.
    """
    fastest = results_at(ranked, ranked.iter_fitting(ranked.fastest, ("pp", "tp")))
    results: dict[tuple[int, int], LayoutResult | float] = {
        (result.run.parallel.pp, result.run.parallel.tp): result for result in fastest
    }
    for index in ranked.first_of_each(ranked.smallest, ("pp", "tp")):
        parallel = ranked.run_at(index).parallel
        if (parallel.pp, parallel.tp) not in results:
            results[parallel.pp, parallel.tp] = ranked.count_bytes(int(index))
    return results


def too_large_results(ranked: RankedLayouts, limit: int) -> Iterator[LayoutResult]:
    """Yield up to `limit` layouts that do not fit in memory but would be faster than the fastest that fits. If no
    layout fits at all, yield those that need the least memory.
    """
    if ranked.best_index is not None:
        yield from results_at(ranked, ranked.first_of_each(ranked.faster_but_too_large)[:limit])
    else:
        smallest = results_at(ranked, ranked.first_of_each(ranked.smallest)[: 4 * limit])
        yield from sorted(smallest, key=lambda result: result.total_bytes)[:limit]


@dataclass(frozen=True)
class CurvePoint:
    """The best layouts at one number of devices, a point of the scaling curve."""

    gpus: int
    best: LayoutResult | None  # None if no layout fits
    zero3_only: LayoutResult | None  # the fastest layout with zero 3 alone, sharded over all devices
    same_cut: LayoutResult | None  # the fastest layout with the previous point's pp and tp, if `best` has others
    gain: float | None = None  # ratio of tokens/s to the previous point; 2 is the ideal for twice the devices

    def to_dict(self) -> dict[str, Any]:
        """Return the point of the scaling curve as a dict of JSON values, in the form that `lmtrain plan --json`
        prints.
        """
        return {
            "gpus": self.gpus, "gain": self.gain, "best": self.best and self.best.to_dict(),
            "plain": self.zero3_only and self.zero3_only.to_dict(), "kept": self.same_cut and self.same_cut.to_dict(),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScalingInputs:
    """The inputs of a scaling curve that stay the same for every number of devices."""

    run: PlannedRun
    hardware: Hardware
    limits: LayoutLimits
    cost_model: CostModel
    fixed_settings: FixedSettings
    batch_per_gpu: float = 0.0  # samples; 0: the batch stays as it is
    objective: str = "time"  # "time" or "joules": the quantity to minimize

    def rank_layouts(self, gpus: int) -> RankedLayouts:
        """Return the ranking of all legal layouts of the run on `gpus` devices. If `self.batch_per_gpu` is not 0, the
        global batch is that number times `gpus`; otherwise it is the run's own.
        """
        run = replace(self.run, global_batch=round(self.batch_per_gpu * gpus) or self.run.global_batch)
        return rank_layouts(
            legal_layouts(run, gpus, self.hardware, self.fixed_settings), self.hardware, self.limits, self.cost_model
        )

    def best_first(self, ranked: RankedLayouts) -> Indices:
        """Return the indices of layouts that may fit in memory, the best by `objective` first."""
        return ranked.most_frugal if self.objective == "joules" else ranked.fastest


def scaling_curve(inputs: ScalingInputs, first_ranking: RankedLayouts, gpus: Sequence[int]) -> Iterator[CurvePoint]:
    """Yield a CurvePoint with the best layouts for each number of devices in `gpus`, in order. `first_ranking` is the
    ranking of layouts for `gpus[0]`, which the caller has already.
    """
    previous: LayoutResult | None = None
    for index, num_gpus in enumerate(gpus):
        ranked = inputs.rank_layouts(num_gpus) if index else first_ranking
        indices = inputs.best_first(ranked)
        best = _best_among(ranked, indices, {})
        cuts = {"pp": previous.run.parallel.pp, "tp": previous.run.parallel.tp} if previous else {}
        has_other_cut = best is not None and any(getattr(best.run.parallel, key) != size for key, size in cuts.items())
        yield CurvePoint(
            num_gpus, best, zero3_only=_best_among(ranked, indices, {"pp": 1, "tp": 1, "shard": num_gpus, "zero": 3}),
            same_cut=_best_among(ranked, indices, cuts) if has_other_cut else None,
            gain=best.tokens_per_s / previous.tokens_per_s if best and previous else None,
        )  # fmt: skip
        previous = best or previous


def _best_among(ranked: RankedLayouts, indices: Indices, required: dict[str, int]) -> LayoutResult | None:
    """Return the result of the first layout in `indices` that fits in memory and has the values `required`, such as
    {"pp": 1}; None if there is none.
    """
    for name, size in required.items():
        indices = indices[ranked.space.column(name, ranked.rows[indices]) == size]
    return next(iter(results_at(ranked, islice(ranked.iter_fitting(indices), 1))), None)
