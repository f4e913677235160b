"""Results for single layouts: the parts of a step's time, the fullest rank's memory, the cost of a token.

Also the curve over numbers of devices: the best layout at each number, searched anew, and the previous number's layout
carried over to it. Called by the verb for the few layouts that are shown. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from lmtrain.plan.price.hardware import Hardware
from lmtrain.plan.price.step import StepTime, watts
from lmtrain.plan.run_model.memory import GIB
from lmtrain.plan.run_model.ranks import fullest_rank, rank_bytes_of
from lmtrain.plan.run_model.replay import Seconds, price_runs
from lmtrain.plan.run_model.run import Planned
from lmtrain.plan.search.rank import Limits, Prices, Ranked, rank
from lmtrain.plan.search.search import Fixed, Rows, legal

PARTS = {  # disjoint parts of a step's time
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
_EXPOSED = ("tp", "sends", "sharded", "reduce")


@dataclass(frozen=True)
class Answer:
    run: Planned
    hardware: Hardware
    parts: dict[str, float]  # name in PARTS -> seconds
    rank: int  # the fullest rank
    watts: float  # power of a device
    interval: float  # half-width of the 80% interval
    microbatch: Seconds  # durations per micro-batch and block

    @property
    def gpus(self) -> int:
        return self.run.parallel.layout.world_size

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def between(self) -> tuple[float, float]:
        return self.seconds / (1 + self.interval), self.seconds * (1 + self.interval)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Name -> bytes, of the fullest rank."""
        return rank_bytes_of(self.run, self.rank)

    @property
    def held(self) -> int:
        return sum(self.memory.values())

    @property
    def room(self) -> float:
        return self.hardware.memory_GiB * GIB

    @property
    def tokens(self) -> int:
        return self.run.global_batch * self.run.shape.seq_len

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization as a run counts it: full attention, no recompute, relative to the peak FLOP/s."""
        flops = self.run.shape.flops_per_token(scored=self.run.scored_share) * self.tokens_per_s
        return flops / (self.gpus * self.hardware.peak(self.run.product_precision))

    @property
    def bubble(self) -> float:
        return self.parts["bubble"] / self.seconds

    @property
    def exposed(self) -> float:
        """Share of a step in which communication is not overlapped by computation."""
        return sum(self.parts[name] for name in _EXPOSED) / self.seconds

    @property
    def joules_per_token(self) -> float:
        return self.watts * self.gpus / self.tokens_per_s

    def facts(self) -> dict[str, Any]:
        names = ("pp", "vp", "dp_replicate", "dp_shard", "tp", "zero", "sequence_parallel", "schedule", "balance")
        return {
            "parallel": {name: getattr(self.run.parallel, name) for name in names},
            "micro_batch": self.run.micro_batch, "recompute": self.run.recompute.kind,
            "recompute_blocks": getattr(self.run.recompute, "blocks", None),
            "precision": self.run.precision.kind, "gpus": self.gpus, "step_s": self.seconds,
            "step_s_80_percent": list(self.between), "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s / self.gpus, "mfu": self.mfu, "bubble": self.bubble,
            "exposed_communication": self.exposed, "parts_s": self.parts, "memory_bytes": self.memory,
            "held_bytes": self.held, "room_bytes": self.room, "fullest_rank": self.rank, "watts_per_gpu": self.watts,
            "joules_per_token": self.joules_per_token,
        }  # fmt: skip


def answers(ranked: Ranked, places: Iterable[int]) -> list[Answer]:
    return price([ranked.planned(place) for place in places], ranked.hardware, ranked.prices)


def price(runs: Sequence[Planned], hardware: Hardware, prices: Prices) -> list[Answer]:
    if not runs:
        return []
    time, seconds = price_runs(runs, hardware, prices.time)
    power = watts(time, hardware)
    return [
        Answer(run, hardware, _parts(time, at), fullest_rank(run), float(power[at]), prices.interval, seconds[at])
        for at, run in enumerate(runs)
    ]


def _parts(time: StepTime, at: int) -> dict[str, float]:
    found = {name: float(getattr(time, name)[at]) for name in PARTS}
    # because: the busiest rank's time includes all three
    return found | {"compute": found["compute"] - found["tp"] - found["sends"]}


def more(one: Answer, best: Answer, by: str) -> float:
    """Return by which share `one` exceeds the best layout, in time or in joules per token."""
    return one.joules_per_token / best.joules_per_token - 1 if by == "joules" else one.seconds / best.seconds - 1


def why_slower(other: Answer, best: Answer) -> str:
    """Return in words where a layout loses most against the best one."""
    more = {name: other.parts[name] - best.parts[name] for name in PARTS}
    worst = max(more, key=lambda name: more[name])
    gains = min(more, key=lambda name: more[name])
    said = f"{PARTS[worst]} {_signed(more[worst])}"
    return f"{said}, {PARTS[gains]} {_signed(more[gains])}" if more[gains] < -0.05 * more[worst] else said


def _signed(seconds: float) -> str:
    return f"{seconds:+.3g} s" if abs(seconds) >= 1 else f"{1000 * seconds:+.3g} ms"


def map_of(ranked: Ranked) -> dict[tuple[int, int], Answer | float]:
    """Return (pp, tp) -> the fastest layout that fits, or the bytes that the smallest needs if none fits."""
    fastest = answers(ranked, ranked.fitting(ranked.fastest, ("pp", "tp")))
    found: dict[tuple[int, int], Answer | float] = {(one.run.parallel.pp, one.run.parallel.tp): one for one in fastest}
    for place in ranked.firsts(ranked.smallest, ("pp", "tp")):
        parallel = ranked.planned(place).parallel
        if (parallel.pp, parallel.tp) not in found:
            found[parallel.pp, parallel.tp] = ranked.counted(int(place))
    return found


def unfitting(ranked: Ranked, most: int) -> Iterator[Answer]:
    """Yield layouts that would be faster but do not fit; if none fits, those that miss by least."""
    if ranked.best is not None:
        yield from answers(ranked, ranked.firsts(ranked.unfitting)[:most])
    else:
        near = answers(ranked, ranked.firsts(ranked.smallest)[: 4 * most])
        yield from sorted(near, key=lambda one: one.held)[:most]


@dataclass(frozen=True)
class Point:
    gpus: int
    best: Answer | None  # None if no layout fits
    plain: Answer | None  # the fastest layout with zero 3 alone, sharded over all devices
    kept: Answer | None  # the fastest layout with the previous point's pp and tp, if `best` has others
    gain: float | None = None  # ratio of tokens/s to the previous point; 2 is the ideal for twice the devices

    def facts(self) -> dict[str, Any]:
        return {
            "gpus": self.gpus, "gain": self.gain, "best": self.best and self.best.facts(),
            "plain": self.plain and self.plain.facts(), "kept": self.kept and self.kept.facts(),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Study:
    """The inputs that stay the same along the curve."""

    run: Planned
    hardware: Hardware
    limits: Limits
    prices: Prices
    fixed: Fixed
    batch_per_gpu: float = 0.0  # samples; 0: the batch stays as it is
    by: str = "time"  # "time" or "joules": the quantity to minimize

    def ranked(self, gpus: int) -> Ranked:
        run = replace(self.run, global_batch=round(self.batch_per_gpu * gpus) or self.run.global_batch)
        return rank(legal(run, gpus, self.hardware, self.fixed), self.hardware, self.limits, self.prices)

    def ordered(self, ranked: Ranked) -> Rows:
        """Return places of layouts that may fit, the best first."""
        return ranked.frugal if self.by == "joules" else ranked.fastest


def curve(study: Study, first: Ranked, gpus: Sequence[int]) -> Iterator[Point]:
    """Yield a Point for each number of devices, in order; `first` is the ranking of the first number."""
    before: Answer | None = None
    for at, number in enumerate(gpus):
        ranked = study.ranked(number) if at else first
        places = study.ordered(ranked)
        best = _best(ranked, places, {})
        cuts = {"pp": before.run.parallel.pp, "tp": before.run.parallel.tp} if before else {}
        changed = best is not None and any(getattr(best.run.parallel, key) != size for key, size in cuts.items())
        yield Point(
            number, best, plain=_best(ranked, places, {"pp": 1, "tp": 1, "shard": number, "zero": 3}),
            kept=_best(ranked, places, cuts) if changed else None,
            gain=best.tokens_per_s / before.tokens_per_s if best and before else None,
        )  # fmt: skip
        before = best or before


def _best(ranked: Ranked, places: Rows, among: dict[str, int]) -> Answer | None:
    for name, size in among.items():
        places = places[ranked.space.column(name, ranked.rows[places]) == size]
    return next(iter(answers(ranked, islice(ranked.fitting(places), 1))), None)
