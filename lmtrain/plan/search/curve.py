"""What more devices bring: the best layout at each doubling, and what the one before it would have been worth there.

Called by the verb. Every number of devices is searched anew. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from lmtrain.plan.price.hardware import Hardware
from lmtrain.plan.run_model.run import Planned
from lmtrain.plan.search.rank import Limits, Prices, Ranked, rank
from lmtrain.plan.search.result import Answer, answers
from lmtrain.plan.search.search import Fixed, legal
from lmtrain.plan.search.space import Rows


@dataclass(frozen=True)
class Point:
    gpus: int
    best: Answer | None  # None where nothing fits
    plain: Answer | None  # the fastest that only shards weights, over all devices
    kept: Answer | None  # the fastest with as many cuts and stages as the point before had, where the best has others
    gain: float | None = None  # of tokens/s over the point before; 2 would be all that twice the devices can bring

    def facts(self) -> dict[str, Any]:
        return {
            "gpus": self.gpus, "gain": self.gain, "best": self.best and self.best.facts(),
            "plain": self.plain and self.plain.facts(), "kept": self.kept and self.kept.facts(),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Study:
    """What stays the same along the curve."""

    run: Planned
    hardware: Hardware
    limits: Limits
    prices: Prices
    fixed: Fixed
    batch_per_gpu: float = 0.0  # 0: the batch stays as it is
    by: str = "time"  # or joules: what the best has least of

    def ranked(self, gpus: int) -> Ranked:
        run = replace(self.run, global_batch=round(self.batch_per_gpu * gpus) or self.run.global_batch)
        return rank(legal(run, gpus, self.hardware, self.fixed), self.hardware, self.limits, self.prices)

    def ordered(self, ranked: Ranked) -> Rows:
        """Places of what may fit, the best first."""
        return ranked.frugal if self.by == "joules" else ranked.fastest


def curve(study: Study, first: Ranked, gpus: Sequence[int]) -> Iterator[Point]:
    """`first` is what is known of the first number."""
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
