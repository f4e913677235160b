"""The space of all legal layouts of a model on a number of devices, with priced columns. Torch-free.

The settings' own rules decide what is legal and are never restated here. Each rule is evaluated for a few settings at a
time, since no rule connects, for example, stages with shards; tests/unit/plan/test_search.py applies all rules to every
combination and compares. A million layouts share a few thousand stages, copies, cuts and micro-batches. Each of these
is a row of a table (an Axis) for settings that belong together and becomes a case once; a column for a million layouts
is picked from the table that decides the column. Called by rank and its readers, and by a run that leaves its layout
open.
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
from lmtrain.plan.price.workload import Case, Column, Columns, columns
from lmtrain.plan.run_model.checkpoint_size import check_listed, checkpoint_bytes
from lmtrain.plan.run_model.run import Planned, case_of
from lmtrain.schedules.pipeline_schedule import PipelineSchedule

Fixed = Mapping[str, Any]  # keys of `parallel`, micro_batch and recompute -> a fixed value, which is not searched
Sets = dict[str, Any]  # keys of `parallel`, micro_batch and recompute -> value
Rows = NDArray[np.intp]
_ZEROS = (1, 0, 2, 3)  # the default first, because the first of several equally priced layouts is shown


def with_sets(run: Planned, sets: Sets) -> Planned:
    """Return the run with these settings; other keys of `parallel` get their defaults."""
    own = {key: sets[key] for key in ("micro_batch", "recompute") if key in sets}
    return replace(run, parallel=ParallelSettings(**{k: v for k, v in sets.items() if k not in own}), **own)


class Axis:
    """A table of settings that are searched together, with a case per row.

    Rows form groups; within a group, all other settings are equal.
    """

    def __init__(self, run: Planned, hardware: Hardware) -> None:
        self.sets: list[Sets] = []
        self._run, self._hardware = run, hardware
        self._cases: list[Case] = []
        self._usual: list[Case] = []  # of each group: the case that the first axis uses
        self._group: list[int] = []  # of each row: its group's number
        self._groups: dict[tuple[Any, ...], list[int]] = {}

    def group(self, key: tuple[Any, ...], sets: Iterable[Sets], among: Sets) -> list[int]:
        """Add rows for these settings, once for each key, and return the row numbers of the key's group.

        `among` holds the other settings of these cases; with this axis's defaults, it gives the first axis's case.
        """
        if key not in self._groups:
            self._usual.append(self._case(among))
            self._groups[key] = [self.add(one, among, len(self._usual) - 1) for one in sets]
        return self._groups[key]

    def add(self, sets: Sets, among: Sets, group: int = 0) -> int:
        self.sets.append(sets)
        self._group.append(group)
        self._cases.append(self._case(among | sets))
        return len(self.sets) - 1

    def _case(self, sets: Sets) -> Case:
        return case_of(with_sets(self._run, {"micro_batch": 1} | sets), self._hardware)

    @cached_property
    def columns(self) -> Columns:
        return columns(self._cases)

    @cached_property
    def decides(self) -> set[str]:
        """The columns that differ from the default case in any row of a group."""
        usual, group = columns(self._usual), np.array(self._group, dtype=np.intp)
        return {name for name, column in self.columns.arrays.items() if np.any(column != usual.arrays[name][group])}

    @cached_property
    def is_different(self) -> NDArray[np.bool_]:
        """Mask of the rows whose price no earlier row of their group has.

        For example, `balance` does not change the price if the stages are equal.
        """
        table = np.stack([np.array(self._group, dtype=np.float64), *self.columns.arrays.values()])
        found = np.zeros(len(self.sets), dtype=bool)
        found[np.unique(table, axis=1, return_index=True)[1]] = True
        return found


class Space:
    """All layouts of a search. A block has a list of rows for each axis and stands for all their combinations."""

    def __init__(self, run: Planned, axes: Sequence[Axis], blocks: Sequence[Sequence[Sequence[int]]]) -> None:
        self._run, self._axes = run, axes
        parts = [np.meshgrid(*(np.array(rows, dtype=np.int32) for rows in block), indexing="ij") for block in blocks]
        self._rows = [
            np.concatenate([np.zeros(0, np.int32), *(part[at].reshape(-1) for part in parts)])
            for at in range(len(axes))
        ]  # fmt: skip

    def __len__(self) -> int:
        return len(self._rows[0])

    def __iter__(self) -> Iterator[Planned]:
        return (self.planned(row) for row in range(len(self)))

    def planned(self, row: int) -> Planned:
        sets: Sets = {}
        for axis, rows in zip(self._axes, self._rows, strict=True):
            sets |= axis.sets[rows[row]]
        return with_sets(self._run, sets)

    @cached_property
    def different(self) -> Rows:
        """The rows of the space, without those that are priced the same as an earlier row."""
        return np.flatnonzero(np.logical_and.reduce([
            axis.is_different[rows] for axis, rows in zip(self._axes, self._rows, strict=True)
        ]))  # fmt: skip

    def columns(self, rows: Rows) -> Columns:
        return Columns({name: self.column(name, rows) for name in self._axes[0].columns.arrays})

    def column(self, name: str, rows: Rows) -> Column:
        axis = self._decided_by.get(name, 0)
        found: Column = getattr(self._axes[axis].columns, name)[self._rows[axis][rows]]
        return found

    @cached_property
    def _decided_by(self) -> dict[str, int]:
        """Column name -> the axis that decides it, for all columns that the first axis (the stages) does not decide."""
        found: dict[str, int] = {}
        for at, axis in enumerate(self._axes[1:], 1):
            if twice := sorted(found.keys() & axis.decides):
                raise ValueError(f"{twice[0]} of a case depends on two axes of the search: price these together")
            found |= dict.fromkeys(axis.decides, at)
        return found


def legal(run: Planned, world_size: int, hardware: Hardware, fixed: Fixed | None = None) -> Space:
    """Return the space of legal layouts; `run` has all settings that are not searched, such as model and batch."""
    return _Search(run, world_size, hardware, fixed or {}).space()


class _Search:
    def __init__(self, run: Planned, world_size: int, hardware: Hardware, fixed: Fixed) -> None:
        self._run, self._size, self._fixed = run, world_size, fixed
        self._accepts, self._lists = cache(self._is_accepted), cache(self._is_listed)
        self._axes = {name: Axis(run, hardware) for name in ("stages", "copies", "cut", "micro", "again")}

    def space(self) -> Space:
        blocks = []
        for pipeline, tp in product(self._pipelines(), self._values("tp", self._divisors)):
            pp = pipeline["pp"]
            if self._size % (pp * tp) == 0 and any(self._cuts(tp)):
                blocks.append(self._block(pipeline, tp, self._size // (pp * tp)))
        return Space(self._run, list(self._axes.values()), blocks)

    def _block(self, pipeline: Sets, tp: int, dp: int) -> list[list[int]]:
        """Return rows for each axis; any combination of rows is legal."""
        word, pp, vp = pipeline["schedule"], pipeline["pp"], pipeline["vp"]
        layout, all_copies = Layout(pp, vp, dp, 1, tp), {"dp_replicate": 1, "dp_shard": dp, "zero": 1}
        stages, copies, cut, micro, again = self._axes.values()
        micros = micro.group((dp,), self._micros(dp), all_copies)
        found = [row for row in micros if self._batches(layout, micro.sets[row]["micro_batch"])]
        if not found:
            return [[]] * len(self._axes)
        zeros = [zero for zero in _ZEROS if self._accepts(**pipeline, zero=zero, dp_shard=1 if zero < 2 else 2)]
        shared = copies.group((dp, word, pp > 1, *zeros), self._copies(dp, zeros), pipeline | all_copies)
        return [
            [stages.add({**pipeline, "tp": tp}, all_copies)],
            [row for row in shared if self._lists(copies.sets[row]["dp_shard"], tp)],
            cut.group((tp,), self._cuts(tp), {"tp": tp}),
            found,
            again.group(tuple(pipeline.values()), self._again(pipeline), pipeline),
        ]

    def _values(self, key: str, every: Iterable[Any]) -> Iterable[Any]:
        return (self._fixed[key],) if key in self._fixed else every

    @cached_property
    def _divisors(self) -> list[int]:
        return divisors(self._size, self._size)

    def _pipelines(self) -> Iterator[Sets]:
        num_layers, schedules = self._run.model.shape.num_layers, kinds(PipelineSchedule)
        balances = get_args(get_type_hints(ParallelSettings)["balance"])
        for pp in self._values("pp", self._divisors):
            for word, balance in product(self._values("schedule", schedules), self._values("balance", balances)):
                allows: Callable[[int], bool] = schedules[word]().allows  # type: ignore[attr-defined]
                chunks = [n for n in range(1, num_layers // pp + 1) if allows(n)] if pp > 1 else [1]
                for vp in self._values("vp", chunks):
                    if self._accepts(pp=pp, vp=vp, schedule=word, balance=balance):
                        yield {"pp": pp, "vp": vp, "schedule": word, "balance": balance}

    def _copies(self, dp: int, zeros: Sequence[int]) -> Iterator[Sets]:
        for shard, zero in product(self._values("dp_shard", self._divisors), self._values("zero", zeros)):
            if zero in zeros and dp % shard == 0 and self._fixed.get("dp_replicate", dp // shard) == dp // shard:
                sets = {"dp_replicate": dp // shard, "dp_shard": shard, "zero": zero}
                if self._accepts(**sets):
                    yield sets

    def _cuts(self, tp: int) -> Iterator[Sets]:
        every = ({"sequence_parallel": sequence} for sequence in self._values("sequence_parallel", (True, False)))
        return (sets for sets in every if self._accepts(tp=tp, **sets))

    def _micros(self, dp: int) -> Iterator[Sets]:
        each, over = divmod(self._run.global_batch, dp)
        return ({"micro_batch": n} for n in (() if over else self._values("micro_batch", divisors(each, each))))

    def _again(self, pipeline: Sets) -> Iterator[Sets]:
        parallel, num_layers = ParallelSettings(**pipeline), self._run.model.shape.num_layers
        for one in self._values("recompute", [kind() for kind in kinds(RecomputeSettings).values()]):
            assert isinstance(one, RecomputeSettings)
            if not any((*one.problems_in_layout(parallel), *one.problems_in_model(num_layers))):
                yield {"recompute": one}

    def _batches(self, layout: Layout, micro: int) -> bool:
        grows = rampup_problems(layout, self._run.rampup, micro) if self._run.rampup is not None else ()
        return not any((*batch_problems(layout, self._run.global_batch, micro), *grows))

    @cached_property
    def _checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self._run.model, self._run.optim.num_slots)

    def _is_listed(self, shard: int, tp: int) -> bool:
        """Return whether a manifest could list the pieces of a checkpoint, which depends only on shard and tp."""
        if not self._run.saves:
            return True
        try:
            check_listed(
                self._run.model, Layout(1, 1, self._size // (shard * tp), shard, tp), self._run.optim.num_slots,
                self._checkpoint_bytes,
            )  # fmt: skip
        except CheckpointError:
            return False
        return True

    def _is_accepted(self, **sets: Any) -> bool:
        try:
            parallel = ParallelSettings(**sets)
        except LmtrainError:
            return False
        model, compiles = self._run.model, self._run.compute.compile is True
        return not any(layout_problems(model.shape, parallel, uses_dropout=model.uses_dropout, compiles=compiles))
