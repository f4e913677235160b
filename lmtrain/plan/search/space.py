"""Many layouts at once: rows of a few tables, one a table for what is set together, and their columns. Torch-free.

Made by search. A million layouts differ in some thousand stages, copies, cuts and microbatches; each is made a case
once, and a column of a million is picked from the table that decides it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.plan.price.hardware import Hardware
from lmtrain.plan.price.workload import Case, Column, Columns, columns
from lmtrain.plan.run_model.run import Planned, case_of

Sets = dict[str, Any]  # keys of `parallel`, micro_batch and recompute
Rows = NDArray[np.intp]


def with_sets(run: Planned, sets: Sets) -> Planned:
    """The run with these settings, and of `parallel` the usual ones besides."""
    own = {key: sets[key] for key in ("micro_batch", "recompute") if key in sets}
    return replace(run, parallel=ParallelSettings(**{k: v for k, v in sets.items() if k not in own}), **own)


class Axis:
    """What is set together, with the cases that show what follows from it; in groups whose rest is the same."""

    def __init__(self, run: Planned, hardware: Hardware) -> None:
        self.sets: list[Sets] = []
        self._run, self._hardware = run, hardware
        self._cases: list[Case] = []
        self._usual: list[Case] = []  # of each group, as the first axis has it
        self._group: list[int] = []  # of each row
        self._groups: dict[tuple[Any, ...], list[int]] = {}

    def group(self, key: tuple[Any, ...], sets: Iterable[Sets], among: Sets) -> list[int]:
        """`among` is the rest of their cases, and with the usual of this axis what the first axis is priced with."""
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
        """Columns that are not always as usual in their group."""
        usual, group = columns(self._usual), np.array(self._group, dtype=np.intp)
        return {name for name, column in self.columns.arrays.items() if np.any(column != usual.arrays[name][group])}

    @cached_property
    def is_different(self) -> NDArray[np.bool_]:
        """Of each row, whether none before it in its group is priced the same, as `balance` where stages are equal."""
        table = np.stack([np.array(self._group, dtype=np.float64), *self.columns.arrays.values()])
        found = np.zeros(len(self.sets), dtype=bool)
        found[np.unique(table, axis=1, return_index=True)[1]] = True
        return found


class Space:
    """All layouts of a search. A block is a list of rows for each axis, and stands for all their combinations."""

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
        """Rows without those that are priced the same as one before them."""
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
        """Of each column the axis, where that is another than the first, the stages."""
        found: dict[str, int] = {}
        for at, axis in enumerate(self._axes[1:], 1):
            if twice := sorted(found.keys() & axis.decides):
                raise ValueError(f"{twice[0]} of a case depends on two axes of the search: price these together")
            found |= dict.fromkeys(axis.decides, at)
        return found
