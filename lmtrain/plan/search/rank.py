"""All layouts of a search with their seconds, bytes and joules, fastest first. Torch-free.

Called by answers, by the curve over numbers of devices, and by a run that chooses its layout. Bytes of all layouts come
from a closed form (memory), which is within a tenth for most and far off for some; what is said to fit has had the
bytes of its ranks counted (ranks). A layout far from fitting is not timed. Seconds of all layouts come from a closed
form too; the pipelines of what stands first have been replayed, until none of these is known by the closed form alone.
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

_AT_ONCE = 8192  # because: columns of so many stay in a core's cache
_TIMED = 1.5  # of the memory: what needs more is not timed
_NEAR = 1.25  # of the room, by the closed form: what needs more is not counted
_REPLAYED = 12  # of the fastest, and of the fastest of each family
_PASSES = 8  # because: what was replayed may fall behind what was not
_ALIKE = 0.95  # because: by so much it may be less far off with other microbatches
_KIND = (  # columns: of layouts that share these the closed form is about as far off
    "pp", "tp", "schedule", "zero", "sequence_parallel", "again_products", "again_attention", "again_pointwise",
)  # fmt: skip
_PIPELINE = (  # columns: of layouts that share these a closed form's pipeline is about as far off
    "pp", "vp", "schedule", "num_microbatches", "first_stage", "largest_stage", "last_stage",
)  # fmt: skip
FAMILY = ("pp", "tp", "zero", "shard")  # columns: what else differs is a matter of the schedule and of microbatches


@dataclass(frozen=True, kw_only=True)
class Limits:
    margin: float = 0.08  # of the memory, left free
    switch: int = 0  # devices below one switch, where what shares weights has to stay; 0: anywhere


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
    rows: Rows  # of the space: those that are priced apart
    seconds: Column  # inf where not timed
    held: Column  # bytes of the fullest rank, by the closed form
    joules: Column  # of one device for a step
    below_switch: NDArray[np.bool_]  # that it does not cross one, where it must not
    _counted: dict[int, float] = field(default_factory=dict, init=False)  # bytes of fullest ranks, by place
    # of each kind the newest that has been counted, beside the closed form
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
        """The number of layouts that fit by the closed form."""
        return int(np.sum(self.allowed & (self.held <= self.usable)))

    @cached_property
    def smallest(self) -> Rows:
        """Places of all that the limits leave, whether they fit or not."""
        return self._sorted(self.held, self.below_switch)

    @cached_property
    def fastest(self) -> Rows:
        """Places of those that may fit: `fitting` tells which of them do."""
        return self._sorted(self.seconds, self._near)

    @cached_property
    def frugal(self) -> Rows:
        return self._sorted(self.joules, self._near)

    @cached_property
    def best(self) -> int | None:
        """The fastest that fits."""
        return next(self.fitting(self.fastest), None)

    @cached_property
    def unfitting(self) -> Rows:
        """Places of those that are faster than all that fit, and do not."""
        best = np.inf if self.best is None else self.seconds[self.best]
        return self._sorted(self.seconds, self.allowed & (self.seconds < best))

    def fitting(self, places: Rows, columns: tuple[str, ...] = ()) -> Iterator[int]:
        """Yield the places that fit by the counted bytes of their ranks; with columns, the first of each family."""
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
        """Replace closed forms by replays for the fastest layouts, and for others with an equal pipeline.

        Once, before anything is asked.
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
            longer[alike[places[::-1]]] = time.total[::-1] / closed[places[::-1]]  # of a kind its fastest
            self.seconds[near] = closed[near] * longer[alike[near]]
            self.seconds[list(replayed)] = list(replayed.values())
            self.joules[near] = joules[near] * (self.seconds[near] / closed[near])

    def planned(self, place: int) -> Planned:
        return self.space.planned(int(self.rows[place]))

    def counted(self, place: int) -> float:
        """Bytes of the fullest rank."""
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
        # because: to six digits, machines agree; of equals the one that was found first is the plainer
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
    """Return a number for each row; rows with equal columns have the same number."""
    found = np.zeros(len(columns[0]), dtype=np.intp)
    for column in columns:
        values, at = np.unique(column, return_inverse=True)
        found = np.unique(found * len(values) + at, return_inverse=True)[1]
    return found


def _rounded(values: Column) -> Column:
    scale: Column = 10.0 ** (np.floor(np.log10(np.maximum(values, 1e-12))) - 5)
    return np.where(np.isfinite(values), np.round(values / scale) * scale, np.inf)
