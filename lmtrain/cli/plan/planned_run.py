"""A question answered: the ranking, the curve, and what a budget of tokens costs, as facts for a screen or a page.

Called by `lmtrain plan`. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from lmtrain.cli.plan.planning import Question, nothing_legal
from lmtrain.errors import LayoutError
from lmtrain.placement.parallel_settings import MAX_PROCESSES
from lmtrain.plan.calibrate import prices_of
from lmtrain.plan.price.step import dollars
from lmtrain.plan.run_model.run import Planned
from lmtrain.plan.search.rank import FAMILY, Limits, Prices, Ranked
from lmtrain.plan.search.result import Answer, Point, Study, answers, curve, map_of, price, unfitting, why_slower
from lmtrain.train.costs import Costs, young_daly_s
from lmtrain.train.layouts.layout_table import layout_words

Span = tuple[float, float]
_FASTEST_SAVE_S = 1.0  # for which training is held up: less is hard to measure
_LEAST_FIT = 3


@dataclass(frozen=True)
class Found:
    question: Question
    ranked: Ranked
    best: list[Answer]
    too_large: list[Answer]
    points: list[Point]
    cells: dict[tuple[int, int], Answer | float]
    ranges: list[tuple[str, Span | None]]  # what is assumed, and tokens/s with other values
    by: str = "time"
    hourly: float | None = None  # dollars of a device

    @property
    def first(self) -> Answer | None:
        return self.best[0] if self.best else None

    def rates(self, answer: Answer) -> tuple[float, float]:
        """Tokens a second, from the slowest to the fastest that is to be expected, open questions included."""
        rates = [answer.tokens / seconds for seconds in answer.between]
        if answer is self.first:
            rates += [rate for _, span in self.ranges for rate in span or ()]
        return min(rates), max(rates)

    def duration(self, answer: Answer) -> tuple[float, float, float] | None:
        """Seconds of all tokens, as expected, at best and at worst."""
        tokens = self.question.tokens
        if tokens is None:
            return None
        slow, fast = self.rates(answer)
        return tokens / answer.tokens_per_s, tokens / fast, tokens / slow

    def dollars(self, answer: Answer) -> tuple[float, ...] | None:
        duration = self.duration(answer)
        if duration is None or self.hourly is None:
            return None
        return tuple(dollars(seconds, answer.gpus, self.hourly) for seconds in duration)

    @property
    def save_every(self) -> tuple[float, float] | None:
        """Seconds between saves, by Young and Daly, for a fast save and for one to a slow disk."""
        between, model = self.question.config.run.time_between_failures, self.question.run.model
        if between is None:
            return None
        slow = Costs(model.num_parameters // self.question.gpus).save_s
        return young_daly_s(_FASTEST_SAVE_S, between), young_daly_s(max(slow, _FASTEST_SAVE_S), between)

    def facts(self) -> dict[str, Any]:
        question, ranked = self.question, self.ranked
        return {
            "model": question.run.model.to_dict(), "hardware": question.hardware.name,
            "unchecked_hardware": question.hardware.unchecked, "gpus": question.gpus,
            "global_batch": question.run.global_batch, "seq_len": question.run.shape.seq_len, "tokens": question.tokens,
            "assumed": [{"what": said, "tokens_per_s": span} for said, span in self.ranges],
            "layouts": {"legal": len(ranked.space), "priced": len(ranked.rows), "fitting": ranked.num_fitting},
            "interval": ranked.prices.interval, "joules_are": "unverified", "by": self.by,
            "best": [self._facts(one) for one in self.best],
            "does_not_fit": [one.facts() | {"over_bytes": self.over(one)} for one in self.too_large],
            "curve": [one.facts() for one in self.points],
            "save_every_s": self.save_every,
        }  # fmt: skip

    def _facts(self, answer: Answer) -> dict[str, Any]:
        assert self.first is not None  # because: it is first among these
        return answer.facts() | {
            "words": layout_words(answer.run.parallel), "duration_s": self.duration(answer),
            "dollars": self.dollars(answer), "slower": answer.seconds / self.first.seconds - 1,
            "why_slower": None if answer is self.first else why_slower(answer, self.first),
        }  # fmt: skip

    def over(self, answer: Answer) -> float:
        """Bytes too many."""
        return answer.held - self.ranked.usable


def find(
    question: Question, *, top: int, every: bool, by: str, doublings: int, grow_batch: bool, margin: float,
    switch: int, hourly: float | None,
) -> Found:  # fmt: skip
    study = Study(
        run=question.run, hardware=question.hardware, limits=Limits(margin=margin, switch=switch),
        prices=prices_of(question.hardware),
        fixed=question.fixed, batch_per_gpu=question.run.global_batch / question.gpus if grow_batch else 0.0, by=by,
    )  # fmt: skip
    ranked = study.ranked(question.gpus)
    if not len(ranked.space):
        raise nothing_legal(question)
    if not len(ranked.smallest):
        raise LayoutError(_beyond_switch(ranked))
    best = answers(ranked, islice(ranked.fitting(study.ordered(ranked), () if every else FAMILY), top))
    ranges = list(_ranges(question, study.prices, best[:1]))
    sizes = [gpus for at in range(doublings + 1) if (gpus := question.gpus << at) <= MAX_PROCESSES]
    points = list(curve(study, ranked, sizes)) if doublings else []
    return Found(
        question, ranked, best, list(unfitting(ranked, _LEAST_FIT)), points, map_of(ranked), ranges, by, hourly,
    )  # fmt: skip


def _beyond_switch(ranked: Ranked) -> str:
    node, space = ranked.hardware.gpus_per_node, ranked.space
    least = int(np.min(space.column("shard", ranked.rows) * space.column("tp", ranked.rows)))
    return (
        f"--nodes-per-switch {ranked.limits.switch // node} leaves none of {len(space):,} legal layouts: in each of "
        f"them {least} GPUs or more share weights (dp_shard x tp), and {node} are a node. Use --nodes-per-switch "
        f"{-(-least // node)}, or leave dp_shard and dp_replicate open."
    )


def _ranges(question: Question, prices: Prices, best: list[Answer]) -> Iterator[tuple[str, Span | None]]:
    """Each assumption, with the tokens a second that the best layout would make with other values."""
    for one in question.assumed:
        others = [_in_layout(run, best[0].run) for run in one.others.values()] if best else []
        every = [*best, *price(others, question.hardware, prices)]
        rates = [answer.tokens / seconds for answer in every for seconds in answer.between]
        yield one.said, (min(rates), max(rates)) if others else None


def _in_layout(run: Planned, of: Planned) -> Planned:
    """Another run in the same layout, with microbatches that divide its batch."""
    micro = math.gcd(of.micro_batch, run.global_batch // of.parallel.layout.dp)
    return replace(run, parallel=of.parallel, recompute=of.recompute, micro_batch=max(micro, 1))
