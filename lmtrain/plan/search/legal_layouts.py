"""The space of all legal layouts of a model on a number of devices, and their numbers for prediction. Torch-free.

The settings' own rules decide what is legal and are never restated here. Each rule is evaluated for a few settings at a
time, since no rule connects, for example, stages with shards; tests/unit/plan/test_layout_space.py applies all rules to
every combination and compares. A million layouts share a few thousand choices of stages, replicas, sequence
parallelism, micro-batches and recompute. Each choice is a row of a SettingsTable and becomes a Case once; an array for
a million layouts is picked from the table that decides the array. Called by rank_layouts and its readers, and by a run
that leaves its layout open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import product
from typing import Any, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from lmtrain.config.settings_base import kinds
from lmtrain.errors import CheckpointError, LmtrainError
from lmtrain.layout import Layout, divisors
from lmtrain.parallel.device_and_precision_settings import RecomputeSettings
from lmtrain.placement.batch_rampup_settings import rampup_problems
from lmtrain.placement.parallel_settings import ParallelSettings, batch_problems, layout_problems
from lmtrain.plan.cost_model.hardware_figures import Hardware
from lmtrain.plan.cost_model.training_workload import Case, Cases, PerCase, stack_cases
from lmtrain.plan.run_estimates.checkpoint_size import check_manifest_limits, checkpoint_bytes
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun, build_case
from lmtrain.schedules.pipeline_schedule import PipelineSchedule

# keys of `parallel`, micro_batch and recompute -> a fixed value, which is not searched
FixedSettings = Mapping[str, Any]
LayoutSettings = dict[str, Any]  # keys of `parallel`, micro_batch and recompute -> value
Indices = NDArray[np.intp]
_ZERO_STAGES = (1, 0, 2, 3)  # the default first, because the first of several equally priced layouts is shown


def with_settings(run: PlannedRun, settings: LayoutSettings) -> PlannedRun:
    """Return a copy of the run with another parallel layout. `settings` holds fields of ParallelSettings, which get
    their defaults if they are missing, and optionally micro_batch and recompute, which stay those of the run if they
    are missing.
    """
    run_settings = {key: settings[key] for key in ("micro_batch", "recompute") if key in settings}
    return replace(
        run, parallel=ParallelSettings(**{k: v for k, v in settings.items() if k not in run_settings}), **run_settings
    )


class SettingsTable:
    """A table of the legal values of some settings that belong together, such as dp_replicate, dp_shard and zero.

    Each row is a dict of settings, with the Case that results. Rows form groups; within a group, all other settings are
    equal.
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
        """Add a row to the table for each dict of settings in `rows`, as one group, and return the numbers of these
        rows. If the table already has a group `key`, add nothing and return that group's rows. `other_settings` are the
        settings of other tables with which time and memory are predicted.

        `other_settings` alone, with defaults for this table's settings, give the case that the first table uses.
        """
        if key not in self._rows_by_key:
            self._default_cases.append(self._case(other_settings))
            self._rows_by_key[key] = [
                self.add_row(settings, other_settings, len(self._default_cases) - 1) for settings in rows
            ]
        return self._rows_by_key[key]

    def add_row(self, settings: LayoutSettings, other_settings: LayoutSettings, group: int = 0) -> int:
        """Add `settings` as a row to the table and return its number, from 0. `other_settings` are the settings of
        other tables with which its time and memory are predicted; `group` is the number of the group of rows to which
        it belongs.
        """
        self.settings.append(settings)
        self._group_of_row.append(group)
        self._cases.append(self._case(other_settings | settings))
        return len(self.settings) - 1

    def _case(self, settings: LayoutSettings) -> Case:
        """Return the run with these settings, and defaults for all others, as a Case."""
        return build_case(with_settings(self._run, {"micro_batch": 1} | settings), self._hardware)

    @cached_property
    def columns(self) -> Cases:
        """The numbers of all rows' cases, as arrays."""
        return stack_cases(self._cases)

    @cached_property
    def deciding_columns(self) -> set[str]:
        """Names of the arrays that this table decides: any row of a group differs from the group's default case in
        them.
        """
        defaults, group = stack_cases(self._default_cases), np.array(self._group_of_row, dtype=np.intp)
        return {name for name, column in self.columns.arrays.items() if np.any(column != defaults.arrays[name][group])}

    @cached_property
    def is_distinct(self) -> NDArray[np.bool_]:
        """Boolean array with an entry for each row of the table: True if the row's predicted time and memory differ
        from those of all earlier rows of its group.

        For example, `balance` does not change the prediction if the stages are equal.
        """
        table = np.stack([np.array(self._group_of_row, dtype=np.float64), *self.columns.arrays.values()])
        is_distinct = np.zeros(len(self.settings), dtype=bool)
        is_distinct[np.unique(table, axis=1, return_index=True)[1]] = True
        return is_distinct


class LayoutSpace:
    """The layouts of a search. A layout combines a row of each settings table.

    A combination has a list of rows for each table and stands for all layouts that pick a row from each list.
    """

    def __init__(
        self, run: PlannedRun, tables: Sequence[SettingsTable], combinations: Sequence[Sequence[Sequence[int]]]
    ) -> None:
        self._run, self._tables = run, tables
        parts = [
            np.meshgrid(*(np.array(rows, dtype=np.int32) for rows in combination), indexing="ij")
            for combination in combinations
        ]
        self._rows = [
            np.concatenate([np.zeros(0, np.int32), *(part[index].reshape(-1) for part in parts)])
            for index in range(len(tables))
        ]  # fmt: skip

    def __len__(self) -> int:
        return len(self._rows[0])

    def run_at(self, row: int) -> PlannedRun:
        """Return a copy of the searched run that has the layout with this row number in the space."""
        settings: LayoutSettings = {}
        for table, rows in zip(self._tables, self._rows, strict=True):
            settings |= table.settings[rows[row]]
        return with_settings(self._run, settings)

    @cached_property
    def distinct_rows(self) -> Indices:
        """Row numbers of the layouts in the space, without those whose predicted time and memory equal those of an
        earlier layout.
        """
        return np.flatnonzero(np.logical_and.reduce([
            table.is_distinct[rows] for table, rows in zip(self._tables, self._rows, strict=True)
        ]))  # fmt: skip

    def columns(self, rows: Indices) -> Cases:
        """Return the numbers from which time and memory of these layouts are predicted, as arrays in the order of
        `rows`.
        """
        return Cases({name: self.column(name, rows) for name in self._tables[0].columns.arrays})

    def column(self, name: str, rows: Indices) -> PerCase:
        """Return the value of the quantity `name`, such as "pp" or "microbatch", in each of the layouts with the row
        numbers `rows`, as an array.
        """
        table = self._table_of_column.get(name, 0)
        values: PerCase = getattr(self._tables[table].columns, name)[self._rows[table][rows]]
        return values

    @cached_property
    def _table_of_column(self) -> dict[str, int]:
        """Dict that maps the name of a quantity, such as "microbatch", to the index of the settings table whose rows
        decide its value. Quantities that it lacks are decided by table 0. Raise ValueError if two tables decide one.
        """
        table_of_column: dict[str, int] = {}
        for index, table in enumerate(self._tables[1:], 1):
            if conflicts := sorted(table_of_column.keys() & table.deciding_columns):
                raise ValueError(
                    f"The column {conflicts[0]} depends on two tables of settings. Put these settings into one table."
                )
            table_of_column |= dict.fromkeys(table.deciding_columns, index)
        return table_of_column


def most_gpus_that_share(batch: int, gpus: int, parts: int) -> int:
    """Return the largest number of GPUs, at most `gpus`, among which a batch can be divided evenly and that is a
    multiple of `parts`; `gpus` if there is none.
    """
    return max((n for n in divisors(batch, batch) if n <= gpus and n % parts == 0), default=gpus)


def legal_layouts(
    run: PlannedRun, world_size: int, hardware: Hardware, fixed_settings: FixedSettings | None = None
) -> LayoutSpace:
    """Return all layouts of a run on `world_size` devices that the settings' rules allow. `run` has the settings that
    are not searched, such as model and batch; `fixed_settings` holds values that every layout must have.
    """
    return _LayoutEnumerator(run, world_size, hardware, fixed_settings or {}).space()


class _LayoutEnumerator:
    """The enumeration of legal layouts. Each rule is evaluated only for the few settings that it concerns."""

    def __init__(self, run: PlannedRun, world_size: int, hardware: Hardware, fixed_settings: FixedSettings) -> None:
        self._run, self._world_size, self._fixed = run, world_size, fixed_settings
        self._is_accepted_cached, self._has_legal_manifest_cached = (
            cache(self._is_accepted),
            cache(self._has_legal_manifest),
        )
        self._tables = {
            name: SettingsTable(run, hardware)
            for name in ("stages", "replicas", "sequence_parallel", "micro_batch", "recompute")
        }

    def space(self) -> LayoutSpace:
        """Find all layouts of the run that are legal by the rules of its settings, and return them as a LayoutSpace."""
        combinations = []
        for pipeline, tp in product(self._pipeline_settings(), self._fixed_or_all("tp", self._divisors)):
            pp = pipeline["pp"]
            if self._world_size % (pp * tp) == 0 and any(self._sequence_parallel_settings(tp)):
                combinations.append(self._combinations(pipeline, tp, self._world_size // (pp * tp)))
        return LayoutSpace(self._run, list(self._tables.values()), combinations)

    def _combinations(self, pipeline: LayoutSettings, tp: int, dp: int) -> list[list[int]]:
        """Return, for each settings table, the row numbers that are legal with these pipeline settings and sizes tp and
        dp; any choice of one row from each list is a legal layout. All lists are empty if no micro-batch size divides
        the batch.
        """
        schedule, pp, vp = pipeline["schedule"], pipeline["pp"], pipeline["vp"]
        layout, all_copies = Layout(pp, vp, dp, 1, tp), {"dp_replicate": 1, "dp_shard": dp, "zero": 1}
        stages, replicas, sequence, micro, recompute = self._tables.values()
        micros = micro.add_group((dp,), self._micro_batch_settings(dp), all_copies)
        divisible = [row for row in micros if self._is_batch_divisible(layout, micro.settings[row]["micro_batch"])]
        if not divisible:
            return [[]] * len(self._tables)
        zero_stages = [
            zero
            for zero in _ZERO_STAGES
            if self._is_accepted_cached(**pipeline, zero=zero, dp_shard=1 if zero < 2 else 2)
        ]
        shared = replicas.add_group(
            (dp, schedule, pp > 1, *zero_stages), self._replica_settings(dp, zero_stages), pipeline | all_copies
        )
        return [
            [stages.add_row({**pipeline, "tp": tp}, all_copies)],
            [row for row in shared if self._has_legal_manifest_cached(replicas.settings[row]["dp_shard"], tp)],
            sequence.add_group((tp,), self._sequence_parallel_settings(tp), {"tp": tp}),
            divisible,
            recompute.add_group(tuple(pipeline.values()), self._recompute_settings(pipeline), pipeline),
        ]

    def _fixed_or_all(self, key: str, all_values: Iterable[Any]) -> Iterable[Any]:
        """Return only the fixed value of a setting if it has one, else all values."""
        return (self._fixed[key],) if key in self._fixed else all_values

    @cached_property
    def _divisors(self) -> list[int]:
        return divisors(self._world_size, self._world_size)

    def _pipeline_settings(self) -> Iterator[LayoutSettings]:
        """Yield dicts with the keys pp, vp, schedule and balance: all combinations that the rules of the settings
        allow.
        """
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

    def _replica_settings(self, dp: int, zero_stages: Sequence[int]) -> Iterator[LayoutSettings]:
        """Yield dicts with dp_replicate, dp_shard and zero, all legal combinations with dp_replicate x dp_shard = `dp`
        and zero in `zero_stages`.
        """
        for shard, zero in product(
            self._fixed_or_all("dp_shard", self._divisors), self._fixed_or_all("zero", zero_stages)
        ):
            if zero in zero_stages and dp % shard == 0 and self._fixed.get("dp_replicate", dp // shard) == dp // shard:
                settings = {"dp_replicate": dp // shard, "dp_shard": shard, "zero": zero}
                if self._is_accepted_cached(**settings):
                    yield settings

    def _sequence_parallel_settings(self, tp: int) -> Iterator[LayoutSettings]:
        """Yield {"sequence_parallel": True} and {"sequence_parallel": False}, those of the two that are legal with `tp`
        tensor-parallel ranks.
        """
        candidates = (
            {"sequence_parallel": sequence} for sequence in self._fixed_or_all("sequence_parallel", (True, False))
        )
        return (settings for settings in candidates if self._is_accepted_cached(tp=tp, **settings))

    def _micro_batch_settings(self, dp: int) -> Iterator[LayoutSettings]:
        """Yield {"micro_batch": size} for each size that divides the samples that one of `dp` data-parallel ranks gets
        in a step.
        """
        samples_per_replica, rest = divmod(self._run.global_batch, dp)
        return (
            {"micro_batch": n}
            for n in (
                () if rest else self._fixed_or_all("micro_batch", divisors(samples_per_replica, samples_per_replica))
            )
        )

    def _recompute_settings(self, pipeline: LayoutSettings) -> Iterator[LayoutSettings]:
        """Yield {"recompute": settings} for each way to recompute activations that is legal with these pipeline
        settings (pp, vp, schedule, balance).
        """
        parallel, num_layers = ParallelSettings(**pipeline), self._run.model.shape.num_layers
        for recompute in self._fixed_or_all("recompute", [kind() for kind in kinds(RecomputeSettings).values()]):
            assert isinstance(recompute, RecomputeSettings)
            if not any((*recompute.problems_in_layout(parallel), *recompute.problems_in_model(num_layers))):
                yield {"recompute": recompute}

    def _is_batch_divisible(self, layout: Layout, micro_batch: int) -> bool:
        """Return True if the layout can divide the global batch, and each batch size of a ramp-up, into micro-batches
        of this size.
        """
        rampup, global_batch = self._run.rampup, self._run.global_batch
        rampup_faults = () if rampup is None else rampup_problems(layout, rampup, micro_batch, global_batch)
        return not any((*batch_problems(layout, global_batch, micro_batch), *rampup_faults))

    @cached_property
    def _checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self._run.model, self._run.num_saved_tensors)

    def _has_legal_manifest(self, dp_shard: int, tp: int) -> bool:
        """Return True if a checkpoint of the run with these sizes of dp_shard and tp stays within the limits on the
        number of saved pieces and on the size of its index file, or if the run saves no checkpoints.
        """
        if not self._run.saves:
            return True
        try:
            check_manifest_limits(
                self._run.model, Layout(1, 1, self._world_size // (dp_shard * tp), dp_shard, tp),
                self._run.num_saved_tensors,
                self._checkpoint_bytes,
            )  # fmt: skip
        except CheckpointError:
            return False
        return True

    def _is_accepted(self, **settings: Any) -> bool:
        """Return True if `settings`, fields of ParallelSettings, are legal by themselves and for the run's model."""
        try:
            parallel = ParallelSettings(**settings)
        except LmtrainError:
            return False
        model, compiles = self._run.model, self._run.compute.compile is True
        return not any(layout_problems(model.shape, parallel, uses_dropout=model.uses_dropout, compiles=compiles))
