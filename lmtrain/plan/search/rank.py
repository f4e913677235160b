"""Ranking of all layouts of a search by seconds, bytes and joules, fastest first. Torch-free.

Called by result, by the curve over numbers of devices, and by a run that chooses its layout. Bytes of all layouts come
from a closed form (memory), which is within 10% for most layouts and far off for some; a layout is reported to fit only
after the bytes of its ranks were counted (ranks). A layout far from fitting is not timed. Seconds of all layouts come
from a closed form too; the pipelines of the first layouts are replayed, until each of these has a replayed time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from lmtrain.plan.price.hardware import Factors, Hardware, fitted, fitted_memory, interval
from lmtrain.plan.price.step import price_step, watts
from lmtrain.plan.price.workload import Column
from lmtrain.plan.run_model.memory import GIB, price_memory
from lmtrain.plan.run_model.ranks import fullest_rank, rank_bytes_of
from lmtrain.plan.run_model.replay import price_runs
from lmtrain.plan.run_model.run import Planned
from lmtrain.plan.search.search import Rows, Space

_AT_ONCE = 8192  # because: columns of this length stay in a core's cache
_TIMED = 1.5  # multiple of the device's memory; layouts that need more are not timed
_NEAR = 1.25  # multiple of the usable memory, by the closed form; layouts that need more are not counted
_REPLAYED = 12  # number of the fastest layouts, and of the fastest families, to replay
_PASSES = 8  # because: a replayed layout may fall behind one that is not replayed yet
_ALIKE = 0.95  # because: with other micro-batches, the ratio of counted to closed-form bytes may be 5% lower
_KIND = (  # columns: layouts that share these have a similar error of the closed form of memory
    "pp", "tp", "schedule", "zero", "sequence_parallel", "again_products", "again_attention", "again_pointwise",
)  # fmt: skip
_PIPELINE = (  # columns: layouts that share these have a similar error of the closed form of pipelines
    "pp", "vp", "schedule", "num_microbatches", "first_stage", "largest_stage", "last_stage",
)  # fmt: skip
FAMILY = ("pp", "tp", "zero", "shard")  # columns: layouts of a family differ only in schedule and micro-batches


@dataclass(frozen=True, kw_only=True)
class Limits:
    margin: float = 0.08  # share of the memory to leave free
    switch: int = 0  # devices below a switch, within which ranks that share weights must stay; 0: no limit


@dataclass(frozen=True, kw_only=True)
class Prices:
    time: Factors = field(default_factory=fitted)
    memory: Factors = field(default_factory=fitted_memory)
    interval: float = field(default_factory=interval)


@dataclass(frozen=True)
class Ranked:
    space: Space
    hardware: Hardware
    limits: Limits
    prices: Prices
    rows: Rows  # rows of the space with distinct prices
    seconds: Column  # inf where not timed
    held: Column  # bytes of the fullest rank, by the closed form
    joules: Column  # of a device, per step
    below_switch: NDArray[np.bool_]  # True if the layout respects `limits.switch`
    _counted: dict[int, float] = field(default_factory=dict, init=False)  # place -> counted bytes of the fullest rank
    # kind (values of _KIND) -> counted bytes / closed form, from the layout counted last
    _off: dict[tuple[float, ...], float] = field(default_factory=dict, init=False)

    @property
    def allowed(self) -> NDArray[np.bool_]:
        return self.below_switch & np.isfinite(self.seconds)

    @property
    def room(self) -> float:
        return self.hardware.memory_GiB * GIB

    @property
    def usable(self) -> float:
        return self.room * (1 - self.limits.margin)

    @property
    def num_fitting(self) -> int:
        """Number of layouts that fit by the closed form."""
        return int(np.sum(self.allowed & (self.held <= self.usable)))

    @cached_property
    def smallest(self) -> Rows:
        """Places of all layouts within the limits, whether they fit or not, least memory first."""
        return self._sorted(self.held, self.below_switch)

    @cached_property
    def fastest(self) -> Rows:
        """Places of layouts that may fit, fastest first; `fitting` tells which of them do."""
        return self._sorted(self.seconds, self._near)

    @cached_property
    def frugal(self) -> Rows:
        return self._sorted(self.joules, self._near)

    @cached_property
    def best(self) -> int | None:
        """Place of the fastest layout that fits, or None."""
        return next(self.fitting(self.fastest), None)

    @cached_property
    def unfitting(self) -> Rows:
        """Places of layouts that would be faster than the best one but do not fit in memory, fastest first."""
        best = np.inf if self.best is None else self.seconds[self.best]
        return self._sorted(self.seconds, self.allowed & (self.seconds < best))

    def fitting(self, places: Rows, columns: tuple[str, ...] = ()) -> Iterator[int]:
        """Yield places that fit by their ranks' counted bytes, in order; with `columns`, the first of each family."""
        seen = set[tuple[float, ...]]()
        for start in range(0, len(places), _AT_ONCE):
            some = places[start : start + _AT_ONCE]
            families, kinds = self._keys(some, columns), self._keys(some, _KIND)
            for place, family, kind in zip(some.tolist(), families, kinds, strict=True):
                least = self._counted.get(place, self.held[place] * self._off.get(kind, 1 / _NEAR) * _ALIKE)
                if (columns and family in seen) or least > self.usable:
                    continue
                counted = self.counted(place)
                self._off[kind] = counted / self.held[place]
                if counted <= self.usable:
                    seen.add(family)
                    yield place

    def replay_fastest(self) -> None:
        """Replace closed-form times of the fastest layouts by replayed times.

        Other layouts with the same pipeline are scaled by the same ratio. Called once, before any result is read.
        """
        near = np.flatnonzero(self._near & (self.space.column("pp", self.rows) > 1))
        alike = np.full(len(self.rows), -1)
        alike[near] = _alike([self.space.column(name, self.rows[near]) for name in _PIPELINE])
        closed, joules, longer = self.seconds.copy(), self.joules.copy(), np.ones(int(alike.max(initial=0)) + 1)
        replayed = dict[int, float]()
        for _ in range(_PASSES):
            order = self._sorted(self.seconds, self._near)
            first = (*islice(self.fitting(order), _REPLAYED), *islice(self.fitting(order, FAMILY), _REPLAYED))
            places = [place for place in dict.fromkeys(first) if alike[place] >= 0 and place not in replayed]
            if not places:
                return
            time, _ = price_runs([self.planned(place) for place in places], self.hardware, self.prices.time)
            replayed |= dict(zip(places, time.total.tolist(), strict=True))
            longer[alike[places[::-1]]] = time.total[::-1] / closed[places[::-1]]  # each pipeline's fastest
            self.seconds[near] = closed[near] * longer[alike[near]]
            self.seconds[list(replayed)] = list(replayed.values())
            self.joules[near] = joules[near] * (self.seconds[near] / closed[near])

    def planned(self, place: int) -> Planned:
        return self.space.planned(int(self.rows[place]))

    def counted(self, place: int) -> float:
        """Return the counted bytes of the fullest rank; the result is cached."""
        if place not in self._counted:
            run = self.planned(place)
            self._counted[place] = float(sum(rank_bytes_of(run, fullest_rank(run)).values()))
        return self._counted[place]

    @property
    def _near(self) -> NDArray[np.bool_]:
        return self.allowed & (self.held <= _NEAR * self.usable)

    def _keys(self, places: Rows, columns: tuple[str, ...]) -> list[tuple[float, ...]]:
        found = [self.space.column(name, self.rows[places]).tolist() for name in columns]
        return list(zip(*found, strict=True)) if found else [()] * len(places)

    def _sorted(self, by: Column, among: NDArray[np.bool_]) -> Rows:
        places = np.flatnonzero(among)
        # because: rounded to six digits, all machines sort alike; among ties, the layout found first is simpler
        return places[np.argsort(_rounded(by[places]), kind="stable")]

    def firsts(self, places: Rows, columns: tuple[str, ...] = FAMILY) -> Rows:
        """Return the first place of each family, in order."""
        if not len(places):
            return places
        keys = np.stack([self.space.column(name, self.rows[places]) for name in columns])
        return places[np.sort(np.unique(keys, axis=1, return_index=True)[1])]


def rank(space: Space, hardware: Hardware, limits: Limits, prices: Prices) -> Ranked:
    rows, room = space.different, hardware.memory_GiB * GIB
    seconds, held, joules = (np.full(len(rows), np.inf) for _ in range(3))
    for start in range(0, len(rows), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        priced = space.columns(rows[part])
        held[part] = price_memory(priced, prices.memory).total
        near = start + np.flatnonzero(held[part] <= _TIMED * room)
        if len(near):
            time = price_step(priced.take(near - start), prices.time)
            seconds[near], joules[near] = time.total, time.total * watts(time, hardware)
    below = space.column("shard", rows) * space.column("tp", rows) <= (limits.switch or np.inf)
    found = Ranked(space, hardware, limits, prices, rows, seconds, held, joules, below)
    found.replay_fastest()
    return found


def _alike(columns: Sequence[Column]) -> NDArray[np.intp]:
    """Return a number per entry that is equal for entries that agree in all columns."""
    found = np.zeros(len(columns[0]), dtype=np.intp)
    for column in columns:
        values, at = np.unique(column, return_inverse=True)
        found = np.unique(found * len(values) + at, return_inverse=True)[1]
    return found


def _rounded(values: Column) -> Column:
    scale: Column = 10.0 ** (np.floor(np.log10(np.maximum(values, 1e-12))) - 5)
    return np.where(np.isfinite(values), np.round(values / scale) * scale, np.inf)
