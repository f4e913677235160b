"""The space of all legal layouts of a model on a number of devices, with priced columns. Torch-free.

The settings' own rules decide what is legal and are never restated here. Each rule is evaluated for a few settings at a
time, since no rule connects, for example, stages with shards; tests/unit/plan/test_layout_space.py applies all rules to
every combination and compares. A million layouts share a few thousand stages, copies, cuts and micro-batches. Each of
these is a row of a table (an Axis) for settings that belong together and becomes a case once; a column for a million
layouts is picked from the table that decides the column. Called by ranking and its readers, and by a run that leaves
its layout open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import product
from typing import Any, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from lmtrain.config.base import kinds
from lmtrain.errors import CheckpointError, LmtrainError
from lmtrain.layout import Layout, divisors
from lmtrain.parallel.compute_settings import RecomputeSettings
from lmtrain.placement.parallel_settings import ParallelSettings, batch_problems, layout_problems, rampup_problems
from lmtrain.plan.price.hardware import Hardware
from lmtrain.plan.price.workload import Case, Column, Columns, build_columns
from lmtrain.plan.run_model.checkpoint_size import check_manifest_limits, checkpoint_bytes
from lmtrain.plan.run_model.planned_run import PlannedRun, case_of
from lmtrain.schedules.pipeline_schedule import PipelineSchedule

# keys of `parallel`, micro_batch and recompute -> a fixed value, which is not searched
FixedSettings = Mapping[str, Any]
LayoutSettings = dict[str, Any]  # keys of `parallel`, micro_batch and recompute -> value
Rows = NDArray[np.intp]
_ZERO_STAGES = (1, 0, 2, 3)  # the default first, because the first of several equally priced layouts is shown


def with_settings(run: PlannedRun, settings: LayoutSettings) -> PlannedRun:
    """Return the run with these settings; other keys of `parallel` get their defaults."""
    run_settings = {key: settings[key] for key in ("micro_batch", "recompute") if key in settings}
    return replace(
        run, parallel=ParallelSettings(**{k: v for k, v in settings.items() if k not in run_settings}), **run_settings
    )


class Axis:
    """A table of settings that are searched together, with a case per row.

    Rows form groups; within a group, all other settings are equal.
    """

    def __init__(self, run: PlannedRun, hardware: Hardware) -> None:
        self.settings: list[LayoutSettings] = []
        self._run, self._hardware = run, hardware
        self._cases: list[Case] = []
        self._default_cases: list[Case] = []  # of each group: the case that the first axis uses
        self._group_of_row: list[int] = []  # of each row: its group's number
        self._rows_by_key: dict[tuple[Any, ...], list[int]] = {}

    def add_group(
        self, key: tuple[Any, ...], rows: Iterable[LayoutSettings], other_settings: LayoutSettings
    ) -> list[int]:
        """Add a row for each of `rows`, unless the key's group exists, and return the group's row numbers.

        `other_settings` holds the settings of other axes for these cases; alone, with this axis's defaults, they give
        the case that the first axis uses.
        """
        if key not in self._rows_by_key:
            self._default_cases.append(self._case(other_settings))
            self._rows_by_key[key] = [
                self.add_row(settings, other_settings, len(self._default_cases) - 1) for settings in rows
            ]
        return self._rows_by_key[key]

    def add_row(self, settings: LayoutSettings, other_settings: LayoutSettings, group: int = 0) -> int:
        """Add a row and return its number."""
        self.settings.append(settings)
        self._group_of_row.append(group)
        self._cases.append(self._case(other_settings | settings))
        return len(self.settings) - 1

    def _case(self, settings: LayoutSettings) -> Case:
        """Return the run as a case with these settings, and defaults for all others."""
        return case_of(with_settings(self._run, {"micro_batch": 1} | settings), self._hardware)

    @cached_property
    def columns(self) -> Columns:
        """The numbers of all rows' cases."""
        return build_columns(self._cases)

    @cached_property
    def deciding_columns(self) -> set[str]:
        """The columns that differ from the default case in any row of a group."""
        defaults, group = build_columns(self._default_cases), np.array(self._group_of_row, dtype=np.intp)
        return {name for name, column in self.columns.arrays.items() if np.any(column != defaults.arrays[name][group])}

    @cached_property
    def is_distinct(self) -> NDArray[np.bool_]:
        """Mask of the rows whose price no earlier row of their group has.

        For example, `balance` does not change the price if the stages are equal.
        """
        table = np.stack([np.array(self._group_of_row, dtype=np.float64), *self.columns.arrays.values()])
        is_distinct = np.zeros(len(self.settings), dtype=bool)
        is_distinct[np.unique(table, axis=1, return_index=True)[1]] = True
        return is_distinct


class Space:
    """All layouts of a search. A block has a list of rows for each axis and stands for all their combinations."""

    def __init__(self, run: PlannedRun, axes: Sequence[Axis], blocks: Sequence[Sequence[Sequence[int]]]) -> None:
        self._run, self._axes = run, axes
        parts = [np.meshgrid(*(np.array(rows, dtype=np.int32) for rows in block), indexing="ij") for block in blocks]
        self._rows = [
            np.concatenate([np.zeros(0, np.int32), *(part[index].reshape(-1) for part in parts)])
            for index in range(len(axes))
        ]  # fmt: skip

    def __len__(self) -> int:
        return len(self._rows[0])

    def __iter__(self) -> Iterator[PlannedRun]:
        return (self.run_at(row) for row in range(len(self)))

    def run_at(self, row: int) -> PlannedRun:
        """Return the run with the layout of this row."""
        settings: LayoutSettings = {}
        for axis, rows in zip(self._axes, self._rows, strict=True):
            settings |= axis.settings[rows[row]]
        return with_settings(self._run, settings)

    @cached_property
    def distinct_rows(self) -> Rows:
        """The rows of the space, without those that are priced the same as an earlier row."""
        return np.flatnonzero(np.logical_and.reduce([
            axis.is_distinct[rows] for axis, rows in zip(self._axes, self._rows, strict=True)
        ]))  # fmt: skip

    def columns(self, rows: Rows) -> Columns:
        """Return all columns for these rows."""
        return Columns({name: self.column(name, rows) for name in self._axes[0].columns.arrays})

    def column(self, name: str, rows: Rows) -> Column:
        """Return one column for these rows."""
        axis = self._axis_of_column.get(name, 0)
        values: Column = getattr(self._axes[axis].columns, name)[self._rows[axis][rows]]
        return values

    @cached_property
    def _axis_of_column(self) -> dict[str, int]:
        """Column name -> the axis that decides it, for all columns that the first axis (the stages) does not decide."""
        axis_of_column: dict[str, int] = {}
        for index, axis in enumerate(self._axes[1:], 1):
            if conflicts := sorted(axis_of_column.keys() & axis.deciding_columns):
                raise ValueError(f"{conflicts[0]} of a case depends on two axes of the search: price these together")
            axis_of_column |= dict.fromkeys(axis.deciding_columns, index)
        return axis_of_column


def legal_layouts(run: PlannedRun, world_size: int, hardware: Hardware, fixed: FixedSettings | None = None) -> Space:
    """Return the space of legal layouts; `run` has all settings that are not searched, such as model and batch."""
    return _Search(run, world_size, hardware, fixed or {}).space()


class _Search:
    """The enumeration of legal layouts. Each rule is evaluated for the few settings that it concerns."""

    def __init__(self, run: PlannedRun, world_size: int, hardware: Hardware, fixed: FixedSettings) -> None:
        self._run, self._size, self._fixed = run, world_size, fixed
        self._is_accepted_cached, self._has_legal_manifest_cached = (
            cache(self._is_accepted),
            cache(self._has_legal_manifest),
        )
        self._axes = {name: Axis(run, hardware) for name in ("stages", "copies", "cut", "micro", "again")}

    def space(self) -> Space:
        """Return the space of all legal layouts."""
        blocks = []
        for pipeline, tp in product(self._pipeline_settings(), self._fixed_or_all("tp", self._divisors)):
            pp = pipeline["pp"]
            if self._size % (pp * tp) == 0 and any(self._cut_settings(tp)):
                blocks.append(self._block(pipeline, tp, self._size // (pp * tp)))
        return Space(self._run, list(self._axes.values()), blocks)

    def _block(self, pipeline: LayoutSettings, tp: int, dp: int) -> list[list[int]]:
        """Return rows for each axis with this pipeline, tp and dp; any combination of these rows is legal."""
        schedule, pp, vp = pipeline["schedule"], pipeline["pp"], pipeline["vp"]
        layout, all_copies = Layout(pp, vp, dp, 1, tp), {"dp_replicate": 1, "dp_shard": dp, "zero": 1}
        stages, replicas, cut, micro, recompute = self._axes.values()
        micros = micro.add_group((dp,), self._micro_batch_settings(dp), all_copies)
        divisible = [row for row in micros if self._is_batch_divisible(layout, micro.settings[row]["micro_batch"])]
        if not divisible:
            return [[]] * len(self._axes)
        zeros = [
            zero
            for zero in _ZERO_STAGES
            if self._is_accepted_cached(**pipeline, zero=zero, dp_shard=1 if zero < 2 else 2)
        ]
        shared = replicas.add_group(
            (dp, schedule, pp > 1, *zeros), self._replica_settings(dp, zeros), pipeline | all_copies
        )
        return [
            [stages.add_row({**pipeline, "tp": tp}, all_copies)],
            [row for row in shared if self._has_legal_manifest_cached(replicas.settings[row]["dp_shard"], tp)],
            cut.add_group((tp,), self._cut_settings(tp), {"tp": tp}),
            divisible,
            recompute.add_group(tuple(pipeline.values()), self._recompute_settings(pipeline), pipeline),
        ]

    def _fixed_or_all(self, key: str, all_values: Iterable[Any]) -> Iterable[Any]:
        """Return only the fixed value of a key if it has one, else all values."""
        return (self._fixed[key],) if key in self._fixed else all_values

    @cached_property
    def _divisors(self) -> list[int]:
        return divisors(self._size, self._size)

    def _pipeline_settings(self) -> Iterator[LayoutSettings]:
        """Yield the legal settings of the pipeline."""
        num_layers, schedules = self._run.model.shape.num_layers, kinds(PipelineSchedule)
        balances = get_args(get_type_hints(ParallelSettings)["balance"])
        for pp in self._fixed_or_all("pp", self._divisors):
            for word, balance in product(
                self._fixed_or_all("schedule", schedules), self._fixed_or_all("balance", balances)
            ):
                allows: Callable[[int], bool] = schedules[word]().allows  # type: ignore[attr-defined]
                chunks = [n for n in range(1, num_layers // pp + 1) if allows(n)] if pp > 1 else [1]
                for vp in self._fixed_or_all("vp", chunks):
                    if self._is_accepted_cached(pp=pp, vp=vp, schedule=word, balance=balance):
                        yield {"pp": pp, "vp": vp, "schedule": word, "balance": balance}

    def _replica_settings(self, dp: int, zeros: Sequence[int]) -> Iterator[LayoutSettings]:
        """Yield the legal ways to divide `dp` ranks into replicas and shards, with each zero stage."""
        for shard, zero in product(self._fixed_or_all("dp_shard", self._divisors), self._fixed_or_all("zero", zeros)):
            if zero in zeros and dp % shard == 0 and self._fixed.get("dp_replicate", dp // shard) == dp // shard:
                settings = {"dp_replicate": dp // shard, "dp_shard": shard, "zero": zero}
                if self._is_accepted_cached(**settings):
                    yield settings

    def _cut_settings(self, tp: int) -> Iterator[LayoutSettings]:
        """Yield the legal values of sequence_parallel with this tp."""
        candidates = (
            {"sequence_parallel": sequence} for sequence in self._fixed_or_all("sequence_parallel", (True, False))
        )
        return (settings for settings in candidates if self._is_accepted_cached(tp=tp, **settings))

    def _micro_batch_settings(self, dp: int) -> Iterator[LayoutSettings]:
        """Yield the micro-batches that divide a replica's share of the batch."""
        samples_per_replica, rest = divmod(self._run.global_batch, dp)
        return (
            {"micro_batch": n}
            for n in (
                () if rest else self._fixed_or_all("micro_batch", divisors(samples_per_replica, samples_per_replica))
            )
        )

    def _recompute_settings(self, pipeline: LayoutSettings) -> Iterator[LayoutSettings]:
        """Yield the kinds of recompute that are legal with this pipeline."""
        parallel, num_layers = ParallelSettings(**pipeline), self._run.model.shape.num_layers
        for recompute in self._fixed_or_all("recompute", [kind() for kind in kinds(RecomputeSettings).values()]):
            assert isinstance(recompute, RecomputeSettings)
            if not any((*recompute.problems_in_layout(parallel), *recompute.problems_in_model(num_layers))):
                yield {"recompute": recompute}

    def _is_batch_divisible(self, layout: Layout, micro_batch: int) -> bool:
        """Return whether the layout divides the batch, and each batch size of a ramp-up, into such micro-batches."""
        rampup_faults = rampup_problems(layout, self._run.rampup, micro_batch) if self._run.rampup is not None else ()
        return not any((*batch_problems(layout, self._run.global_batch, micro_batch), *rampup_faults))

    @cached_property
    def _checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self._run.model, self._run.optim.num_slots)

    def _has_legal_manifest(self, shard: int, tp: int) -> bool:
        """Return whether a checkpoint's manifest stays within its limits; the answer depends only on shard and tp."""
        if not self._run.saves:
            return True
        try:
            check_manifest_limits(
                self._run.model, Layout(1, 1, self._size // (shard * tp), shard, tp), self._run.optim.num_slots,
                self._checkpoint_bytes,
            )  # fmt: skip
        except CheckpointError:
            return False
        return True

    def _is_accepted(self, **settings: Any) -> bool:
        """Return whether these keys of `parallel` are legal, by themselves and with the model."""
        try:
            parallel = ParallelSettings(**settings)
        except LmtrainError:
            return False
        model, compiles = self._run.model, self._run.compute.compile is True
        return not any(layout_problems(model.shape, parallel, uses_dropout=model.uses_dropout, compiles=compiles))
