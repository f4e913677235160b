"""The search offers exactly the layouts that the settings accept, and prices each as if it were alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from lmtrain.checkpoint.disk import checkpoint_format
from lmtrain.config.settings_base import kinds
from lmtrain.errors import CheckpointError, LmtrainError
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.parallel.device_and_precision_settings import RecomputeSettings
from lmtrain.placement.batch_rampup_settings import RampUpSettings
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.plan.cost_model.training_workload import stack_cases
from lmtrain.plan.run_estimates.checkpoint_size import check_manifest_limits, checkpoint_bytes
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun, build_case
from lmtrain.plan.search.legal_layouts import legal_layouts
from lmtrain.schedules.pipeline_schedule import PipelineSchedule
from lmtrain.train.run_config import RunConfig
from lmtrain.train.train_settings import TrainSettings
from tests.marks import slow
from tests.unit.plan.ranked_run import h100, run_of

SMALL = GPTSettings(num_layers=4, width=24, num_heads=12, num_kv_heads=6, vocab_size=67, vocab_multiple=1, seq_len=6)
DEEP = replace(SMALL, num_layers=9, num_heads=4, num_kv_heads=None, seq_len=8, dropout=0.1)


def key(run: PlannedRun) -> tuple[Any, ...]:
    return run.parallel, run.micro_batch, run.recompute


def every_combination(run: PlannedRun, world_size: int) -> Iterator[tuple[Any, ...]]:
    """All that RunConfig accepts, asked one by one."""
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for pp, replicate, shard, tp in product(sizes, repeat=4):
        if pp * replicate * shard * tp != world_size:
            continue
        for vp, zero, sequence, word, balance in product(
            range(1, run.model.shape.num_layers + 2), range(4), (True, False), kinds(PipelineSchedule),
            ("layers", "cost"),
        ):  # fmt: skip
            try:
                parallel = ParallelSettings(
                    pp=pp, vp=vp, dp_replicate=replicate, dp_shard=shard, tp=tp, zero=zero,
                    sequence_parallel=sequence, schedule=word, balance=balance,  # type: ignore[arg-type]
                )  # fmt: skip
            except LmtrainError:
                continue
            yield from _rest(run, parallel)


def _rest(run: PlannedRun, parallel: ParallelSettings) -> Iterator[tuple[Any, ...]]:
    parts = {"model": run.model, "parallel": parallel, "compute": run.compute}
    if any(RunConfig.problems_across(parts)):
        return
    if run.saves:
        try:
            slots = run.optim.num_slots
            check_manifest_limits(run.model, parallel.layout, slots, checkpoint_bytes(run.model, slots))
        except CheckpointError:
            return
    for micro in range(1, run.global_batch + 1):
        rampup: Any = run.rampup
        train = TrainSettings(steps=1, global_batch=run.global_batch, micro_batch=micro, rampup=rampup)
        if any(RunConfig.problems_across({"train": train, "parallel": parallel})):
            continue
        for kind in kinds(RecomputeSettings).values():
            recompute: Any = kind()
            if not any(RunConfig.problems_across(parts | {"recompute": recompute})):
                yield parallel, micro, recompute


@pytest.mark.parametrize(("model", "world_size", "batch"), [(SMALL, 2, 4), (SMALL, 3, 6)])
def test_all_that_the_settings_accept_is_offered_and_nothing_else(
    model: GPTSettings, world_size: int, batch: int
) -> None:
    _compare(run_of(model, batch), world_size)


@pytest.mark.wide
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(
    ("model", "world_size", "batch"),
    [
        (SMALL, 4, 12), (DEEP, 4, 8), (replace(SMALL, num_kv_heads=4, num_heads=8), 6, 6),
        *slow((SMALL, 12, 12), (DEEP, 8, 24)),
    ],
)
def test_the_same_in_larger_worlds(model: GPTSettings, world_size: int, batch: int, compiles: bool) -> None:
    _compare(run_of(model, batch, compiles=compiles), world_size)


def test_a_batch_that_grows_is_shared_out_on_the_way_too() -> None:
    few = replace(run_of(SMALL, 8), rampup=RampUpSettings(start=2, increment=2, samples=10))
    _compare(few, 2)
    assert {one.micro_batch * one.parallel.layout.dp for one in offered(few, 2)} == {1, 2}


def test_checkpoints_of_what_is_offered_can_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    every, run = offered(run_of(SMALL, 4), 2), replace(run_of(SMALL, 4), saves=True)
    monkeypatch.setattr(checkpoint_format, "MAX_PIECES", 300)
    _compare(run, 2)
    few = {one.parallel.dp_shard * one.parallel.tp for one in offered(run, 2)}
    assert few < {one.parallel.dp_shard * one.parallel.tp for one in every}


def offered(run: PlannedRun, world_size: int, fixed: dict[str, Any] | None = None) -> list[PlannedRun]:
    space = legal_layouts(run, world_size, h100(), fixed)
    return [space.run_at(row) for row in range(len(space))]


def _compare(run: PlannedRun, world_size: int) -> None:
    keys = [key(one) for one in offered(run, world_size)]
    accepted = set(every_combination(run, world_size))
    assert len(keys) == len(set(keys)) > 0
    assert set(keys) == accepted


def test_a_batch_that_no_copies_can_share_leaves_what_has_none() -> None:
    assert {one.parallel.layout.dp for one in offered(run_of(SMALL, 1), 4)} == {1}
    assert len(legal_layouts(run_of(replace(SMALL, num_layers=1, num_heads=1, num_kv_heads=1), 1), 4, h100())) == 0


def test_what_is_given_is_kept() -> None:
    fixed = {"tp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 2}
    found = offered(run_of(SMALL, 8), 8, fixed)
    assert {one.parallel.tp for one in found} == {2}
    assert {(one.parallel.dp_shard, one.parallel.zero, one.micro_batch) for one in found} == {(2, 3, 2)}
    assert {one.parallel.pp for one in found} == {1, 2}


@pytest.mark.parametrize(
    ("model", "fixed"),
    [
        (SMALL, {}),
        (replace(DEEP, num_layers=7, window=3, tied=False), {}),
        (SMALL, {"zero": 3, "dp_shard": 4, "micro_batch": 2, "sequence_parallel": False}),
        (SMALL, {"recompute": kinds(RecomputeSettings)["full"](), "schedule": "interleaved", "tp": 2}),
    ],
)
def test_columns_of_many_are_those_of_each_alone(model: GPTSettings, fixed: dict[str, Any]) -> None:
    space = legal_layouts(run_of(model, 24), 8, h100(), fixed)
    some = random.Random(1).sample(range(len(space)), min(len(space), 100))
    rows = np.array(some, dtype=np.intp)
    many = space.columns(rows)
    alone = stack_cases([build_case(space.run_at(row), h100()) for row in rows])
    assert many.arrays.keys() == alone.arrays.keys()
    for name, column in many.arrays.items():
        np.testing.assert_array_equal(column, alone.arrays[name], err_msg=name)


def test_what_is_priced_the_same_is_priced_once() -> None:
    space = legal_layouts(run_of(SMALL, 8), 4, h100())

    def rows_of(these: Any) -> list[tuple[float, ...]]:
        return list(zip(*space.columns(these).arrays.values(), strict=True))

    different = rows_of(space.distinct_rows)
    assert len(different) < len(space)
    assert len(set(different)) == len(different)
    assert set(different) == set(rows_of(np.arange(len(space))))
