"""Ranking of all layouts of a search by seconds, bytes and joules, fastest first. Torch-free.

Called by predict_layout_cost, by the curve over numbers of devices, and by a run that chooses its layout. Bytes of all
layouts come from a closed form (closed_form_memory), which is within 10% for most layouts and far off for some; a
layout is reported to fit only after the bytes of its ranks were counted (rank_memory_by_purpose). A layout far from
fitting is not timed. Seconds of all layouts come from a closed form too; the pipelines of the first layouts are
simulated (replayed), until each of these has a simulated time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from lmtrain.plan.cost_model.hardware_figures import (
    FittedFactors,
    Hardware,
    fitted_interval,
    fitted_memory_factors,
    fitted_time_factors,
)
from lmtrain.plan.cost_model.step_time_and_energy import price_step, watts
from lmtrain.plan.cost_model.training_workload import PerCase
from lmtrain.plan.run_estimates.closed_form_memory import price_memory
from lmtrain.plan.run_estimates.rank_memory_by_purpose import count_rank_bytes, fullest_rank
from lmtrain.plan.run_estimates.simulate_pipeline import price_runs
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun
from lmtrain.plan.search.legal_layouts import Indices, LayoutSpace

_CHUNK = 8192  # because: columns of this length stay in a core's cache
_TIME_LIMIT = 1.5  # multiple of the device's memory; layouts that need more are not timed
_COUNT_LIMIT = 1.25  # multiple of the usable memory, by the closed form; layouts that need more are not counted
_NUM_REPLAYED = 12  # number of the fastest layouts to simulate, and of the fastest with distinct SHARDING_COLUMNS
_MAX_PASSES = 8  # because: a replayed layout may fall behind one that is not replayed yet
_COUNT_MARGIN = 0.95  # because: with other micro-batches, the ratio of counted to closed-form bytes may be 5% lower
_MEMORY_COLUMNS = (  # columns: layouts that share these have a similar error of the closed form of memory
    "pp", "tp", "schedule", "zero", "sequence_parallel",
    "recomputed_products", "recomputed_attention", "recomputed_pointwise",
)  # fmt: skip
_PIPELINE_COLUMNS = (  # columns: layouts that share these have a similar error of the closed form of pipelines
    "pp", "vp", "schedule", "num_microbatches", "first_stage", "largest_stage", "last_stage",
)  # fmt: skip
SHARDING_COLUMNS = ("pp", "tp", "zero", "shard")  # columns: layouts equal in these differ only in schedule and batches


@dataclass(frozen=True, kw_only=True)
class LayoutLimits:
    """Limits on layouts that do not come from a run's settings."""

    margin: float = 0.08  # share of the memory to leave free
    switch: int = 0  # devices below a switch, within which ranks that share weights must stay; 0: no limit


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Fitted factors that predict time and memory, and the half-width of the 80% interval of a step time."""

    time: FittedFactors = field(default_factory=fitted_time_factors)
    memory: FittedFactors = field(default_factory=fitted_memory_factors)
    interval: float = field(default_factory=fitted_interval)


@dataclass(frozen=True)
class RankedLayouts:
    """The layouts of a search with predicted seconds and bytes. An index identifies a layout: its entry in each array.
    """

    space: LayoutSpace
    hardware: Hardware
    limits: LayoutLimits
    cost_model: CostModel
    rows: Indices  # numbers of the space's layouts with distinct predictions
    seconds: PerCase  # inf where not timed
    estimated_bytes: PerCase  # bytes of the fullest rank, by the closed form
    joules: PerCase  # of a device, per step
    is_below_switch: NDArray[np.bool_]  # True if the layout respects `limits.switch`
    # index -> counted bytes of the fullest rank
    _counted_bytes: dict[int, float] = field(default_factory=dict, init=False)
    # values of _MEMORY_COLUMNS -> counted bytes / closed form, from the layout counted last
    _count_ratios: dict[tuple[float, ...], float] = field(default_factory=dict, init=False)

    @property
    def is_allowed(self) -> NDArray[np.bool_]:
        """Mask of the layouts that were timed and respect `limits.switch`."""
        return self.is_below_switch & np.isfinite(self.seconds)

    @property
    def usable_bytes(self) -> float:
        """Memory of a device in bytes, without the margin to leave free."""
        return self.hardware.memory_bytes * (1 - self.limits.margin)

    @property
    def num_fitting(self) -> int:
        """Number of layouts that fit by the closed form."""
        return int(np.sum(self.is_allowed & (self.estimated_bytes <= self.usable_bytes)))

    @cached_property
    def smallest(self) -> Indices:
        """Indices of all layouts within the limits, whether they fit or not, least memory first."""
        return self._sorted_indices(self.estimated_bytes, self.is_below_switch)

    @cached_property
    def fastest(self) -> Indices:
        """Indices of layouts that may fit, fastest first; `iter_fitting` selects those that do."""
        return self._sorted_indices(self.seconds, self._may_fit)

    @cached_property
    def most_frugal(self) -> Indices:
        """Indices of layouts that may fit, least energy per step first."""
        return self._sorted_indices(self.joules, self._may_fit)

    @cached_property
    def best_index(self) -> int | None:
        """Index of the fastest layout that fits in memory, or None."""
        return next(self.iter_fitting(self.fastest), None)

    @cached_property
    def faster_but_too_large(self) -> Indices:
        """Indices of layouts that would be faster than the best one but do not fit in memory, fastest first."""
        best_seconds = np.inf if self.best_index is None else self.seconds[self.best_index]
        return self._sorted_indices(self.seconds, self.is_allowed & (self.seconds < best_seconds))

    def iter_fitting(self, indices: Indices, columns: tuple[str, ...] = ()) -> Iterator[int]:
        """Yield those of `indices`, in this order, whose layouts fit in the memory of a device by an exact count of
        bytes. With `columns` such as ("pp", "tp"), yield only the first fitting layout for each combination of their
        values.
        """
        seen = set[tuple[float, ...]]()
        for start in range(0, len(indices), _CHUNK):
            chunk = indices[start : start + _CHUNK]
            column_values, memory_keys = (
                self._column_values(chunk, columns),
                self._column_values(chunk, _MEMORY_COLUMNS),
            )
            for index, values_key, memory_key in zip(chunk.tolist(), column_values, memory_keys, strict=True):
                estimate = self._counted_bytes.get(
                    index,
                    self.estimated_bytes[index] * self._count_ratios.get(memory_key, 1 / _COUNT_LIMIT) * _COUNT_MARGIN,
                )
                if (columns and values_key in seen) or estimate > self.usable_bytes:
                    continue
                num_bytes = self.count_bytes(index)
                self._count_ratios[memory_key] = num_bytes / self.estimated_bytes[index]
                if num_bytes <= self.usable_bytes:
                    seen.add(values_key)
                    yield index

    def replay_fastest(self) -> None:
        """Replace the estimated step times of the fastest layouts in `self.seconds` by those of simulated pipelines,
        and correct the joules to match.

        Other layouts with the same pipeline are scaled by the same ratio. Called once, before any result is read.
        """
        candidates = np.flatnonzero(self._may_fit & (self.space.column("pp", self.rows) > 1))
        pipeline_numbers = np.full(len(self.rows), -1)
        pipeline_numbers[candidates] = _group_numbers(
            [self.space.column(name, self.rows[candidates]) for name in _PIPELINE_COLUMNS]
        )
        closed_form, joules, ratios = (
            self.seconds.copy(),
            self.joules.copy(),
            np.ones(int(pipeline_numbers.max(initial=0)) + 1),
        )
        replayed = dict[int, float]()
        for _ in range(_MAX_PASSES):
            order = self._sorted_indices(self.seconds, self._may_fit)
            leaders = (
                *islice(self.iter_fitting(order), _NUM_REPLAYED),
                *islice(self.iter_fitting(order, SHARDING_COLUMNS), _NUM_REPLAYED),
            )
            indices = [
                index for index in dict.fromkeys(leaders) if pipeline_numbers[index] >= 0 and index not in replayed
            ]
            if not indices:
                return
            time, _ = price_runs([self.run_at(index) for index in indices], self.hardware, self.cost_model.time)
            replayed |= dict(zip(indices, time.total.tolist(), strict=True))
            # backwards, so that each pipeline's fastest is written last
            ratios[pipeline_numbers[indices[::-1]]] = time.total[::-1] / closed_form[indices[::-1]]
            self.seconds[candidates] = closed_form[candidates] * ratios[pipeline_numbers[candidates]]
            self.seconds[list(replayed)] = list(replayed.values())
            self.joules[candidates] = joules[candidates] * (self.seconds[candidates] / closed_form[candidates])

    def run_at(self, index: int) -> PlannedRun:
        """Return the run with the layout at this index of the ranking."""
        return self.space.run_at(int(self.rows[index]))

    def count_bytes(self, index: int) -> float:
        """Return the bytes that the layout at this index needs on its fullest rank, by an exact count; the result is
        cached.
        """
        if index not in self._counted_bytes:
            run = self.run_at(index)
            self._counted_bytes[index] = float(sum(count_rank_bytes(run, fullest_rank(run)).values()))
        return self._counted_bytes[index]

    @property
    def _may_fit(self) -> NDArray[np.bool_]:
        """Mask of the allowed layouts whose estimated bytes are near enough to fitting to be counted."""
        return self.is_allowed & (self.estimated_bytes <= _COUNT_LIMIT * self.usable_bytes)

    def _column_values(self, indices: Indices, columns: tuple[str, ...]) -> list[tuple[float, ...]]:
        """Return, for each layout in `indices`, its values in these columns."""
        values = [self.space.column(name, self.rows[indices]).tolist() for name in columns]
        return list(zip(*values, strict=True)) if values else [()] * len(indices)

    def _sorted_indices(self, values: PerCase, mask: NDArray[np.bool_]) -> Indices:
        """Return the indices at which the boolean array `mask` is True, sorted by their entries in `values`, the
        smallest first.
        """
        indices = np.flatnonzero(mask)
        # because: rounded to six digits, all machines sort alike; among ties, the layout found first is simpler
        return indices[np.argsort(_rounded(values[indices]), kind="stable")]

    def first_of_each(self, indices: Indices, columns: tuple[str, ...] = SHARDING_COLUMNS) -> Indices:
        """Return, in the given order, only the first of `indices` for each combination of values that the layouts have
        in `columns`, such as ("pp", "tp").
        """
        if not len(indices):
            return indices
        keys = np.stack([self.space.column(name, self.rows[indices]) for name in columns])
        return indices[np.sort(np.unique(keys, axis=1, return_index=True)[1])]


def rank_layouts(space: LayoutSpace, hardware: Hardware, limits: LayoutLimits, cost_model: CostModel) -> RankedLayouts:
    """Predict memory, step time and energy of all layouts of the space on this machine, and return them so that they
    can be read in order of speed. The step times of the fastest layouts within `limits` come from simulated pipelines,
    others from a formula; layouts far too large for memory get infinite times.
    """
    rows = space.distinct_rows
    seconds, estimated_bytes, joules = (np.full(len(rows), np.inf) for _ in range(3))
    for start in range(0, len(rows), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        priced = space.columns(rows[chunk])
        estimated_bytes[chunk] = price_memory(priced, cost_model.memory).total
        timed = start + np.flatnonzero(estimated_bytes[chunk] <= _TIME_LIMIT * hardware.memory_bytes)
        if len(timed):
            time = price_step(priced.take(timed - start), cost_model.time)
            seconds[timed], joules[timed] = time.total, time.total * watts(time, hardware)
    is_below_switch = space.column("shard", rows) * space.column("tp", rows) <= (limits.switch or np.inf)
    ranked = RankedLayouts(space, hardware, limits, cost_model, rows, seconds, estimated_bytes, joules, is_below_switch)
    ranked.replay_fastest()
    return ranked


def _group_numbers(columns: Sequence[PerCase]) -> NDArray[np.intp]:
    """Return a group number for each index of the columns, which are arrays of equal length: two indices get the same
    number if their values are equal in every column.
    """
    numbers = np.zeros(len(columns[0]), dtype=np.intp)
    for column in columns:
        values, index = np.unique(column, return_inverse=True)
        numbers = np.unique(numbers * len(values) + index, return_inverse=True)[1]
    return numbers


def _rounded(values: PerCase) -> PerCase:
    """Round to six digits; inf stays."""
    scale: PerCase = 10.0 ** (np.floor(np.log10(np.maximum(values, 1e-12))) - 5)
    return np.where(np.isfinite(values), np.round(values / scale) * scale, np.inf)
