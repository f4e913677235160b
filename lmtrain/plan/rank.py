"""All layouts of a search with their seconds, bytes and joules, fastest first. Torch-free.

Called by answers and by the curve over numbers of devices. A layout far from fitting is not timed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lmtrain.plan.case import Column
from lmtrain.plan.factors import Factors, fitted, fitted_memory, interval
from lmtrain.plan.hardware import Hardware
from lmtrain.plan.memory import GIB, price_memory
from lmtrain.plan.power import watts
from lmtrain.plan.space import Rows, Space
from lmtrain.plan.step import price_step

_AT_ONCE = 8192  # because: columns of so many stay in a core's cache
_NEAR = 1.5  # of the memory: what needs more is not timed
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
    held: Column  # bytes of the fullest rank
    joules: Column  # of one device for a step
    fits: NDArray[np.bool_]

    @property
    def room(self) -> float:
        return self.hardware.memory_GiB * GIB

    @cached_property
    def fastest(self) -> Rows:
        """Places of those that fit."""
        return self._sorted(self.seconds, self.fits)

    @cached_property
    def frugal(self) -> Rows:
        return self._sorted(self.joules, self.fits)

    @cached_property
    def unfitting(self) -> Rows:
        """Places of those that are faster than all that fit, and do not."""
        best = self.seconds[self.fastest[0]] if len(self.fastest) else np.inf
        return self._sorted(self.seconds, ~self.fits & (self.seconds < best))

    def _sorted(self, by: Column, among: NDArray[np.bool_]) -> Rows:
        places = np.flatnonzero(among)
        # because: to six digits, machines agree; of equals the one that was found first is the plainer
        return places[np.argsort(_rounded(by[places]), kind="stable")]

    def firsts(self, places: Rows, columns: tuple[str, ...] = FAMILY) -> Rows:
        """The first of each family, in order."""
        if not len(places):
            return places
        keys = np.stack([self.space.column(name, self.rows[places]) for name in columns])
        first = np.unique(keys, axis=1, return_index=True)[1]
        return places[np.sort(first)]


def rank(space: Space, hardware: Hardware, limits: Limits, prices: Prices) -> Ranked:
    rows, room = space.different, hardware.memory_GiB * GIB
    seconds, held, joules = (np.full(len(rows), np.inf) for _ in range(3))
    for start in range(0, len(rows), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        priced = space.columns(rows[part])
        held[part] = price_memory(priced, prices.memory).total
        near = start + np.flatnonzero(held[part] <= _NEAR * room)
        if len(near):
            time = price_step(priced.take(near - start), prices.time)
            seconds[near], joules[near] = time.total, time.total * watts(time, hardware)
    fits = held <= room * (1 - limits.margin)
    if limits.switch:
        fits &= space.column("shard", rows) * space.column("tp", rows) <= limits.switch
    return Ranked(space, hardware, limits, prices, rows, seconds, held, joules, fits)


def _rounded(values: Column) -> Column:
    finite = np.maximum(values, 1e-12)
    scale: Column = 10.0 ** (np.floor(np.log10(finite)) - 5)
    return np.where(np.isfinite(values), np.round(values / scale) * scale, np.inf)
