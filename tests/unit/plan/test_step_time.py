"""Seconds of a step: overlap of collectives with computation, and factors within their ranges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmtrain.plan.cost_model.hardware_figures import MEMORY_FACTORS, TIME_FACTORS
from lmtrain.plan.cost_model.step_time_and_energy import (
    busy_share,
    price_microbatch,
    price_step,
    price_work,
    replica_group,
    stage_weights,
)
from lmtrain.plan.cost_model.training_workload import Case, Program, RecomputedShares, stack_cases
from tests.unit.plan.cases import gpt3
from tests.unit.plan.machines import nominal, range_problems

F = nominal()


def _program(trait: str, on: bool) -> Program:
    changes: dict[str, Any] = {trait: on}
    return replace(Program(), **changes)


def total(case: Case) -> float:
    return float(price_step(stack_cases([case]), F).total[0])


def test_gpt3_on_1024_a100_takes_about_the_published_time() -> None:
    full = RecomputedShares(products=1.0, attention=1.0, pointwise=1.0, collectives=1.0)
    assert total(gpt3(recomputed=full)) == pytest.approx(32.0, rel=0.2)  # Megatron-LM's own note: around 32 seconds


def test_parts_add_up() -> None:
    step = price_step(stack_cases([gpt3(), gpt3(pp=1, dp=128, zero=3, shard=128, num_microbatches=12)]), F)
    assert np.all(step.bubble >= -1e-9)
    assert np.all(step.total > step.compute)


def test_messages_are_no_computation() -> None:
    """A part of their own, whose time grows with a rank's stages."""
    step = price_step(stack_cases([gpt3(), gpt3(vp=6), gpt3(pp=1, dp=128)]), F)
    assert step.sends[1] == pytest.approx(6 * step.sends[0])
    assert step.sends[2] == 0.0
    assert np.all(busy_share(step) <= (step.total - step.tp - step.sends) / step.total)


@pytest.mark.parametrize("trait", ["reduce_overlap", "gather_overlap", "send_overlap", "fused_gradients"])
def test_what_overlaps_or_is_fused_saves_time(trait: str) -> None:
    without, with_it = (gpt3(program=_program(trait, on)) for on in (False, True))
    assert total(with_it) < total(without)


def test_numbers_of_four_bytes_take_twice_as_long_on_their_way() -> None:
    """At the same peak: what is left are bytes. Sums of gradients have four bytes in either."""
    whole = replace(gpt3().hardware, peak_tflops={"bf16": 312.0, "fp32": 312.0})
    layout = {"hardware": whole, "pp": 4, "dp": 8, "zero": 3, "num_microbatches": 8}
    half, full = stack_cases([gpt3(precision="bf16", **layout)]), stack_cases([gpt3(precision="fp32", **layout)])
    before, after = price_step(half, F), price_step(full, F)
    assert after.tp[0] == pytest.approx(2 * before.tp[0], rel=0.05)
    assert after.sends[0] == pytest.approx(2 * before.sends[0], rel=0.05)
    assert after.update[0] == before.update[0]
    one, two = price_microbatch(half, F), price_microbatch(full, F)
    assert two.gather[0] == pytest.approx(2 * one.gather[0], rel=0.05)
    assert two.reduce[0] == one.reduce[0]
    assert price_work(full, F).pointwise[0] > 1.8 * price_work(half, F).pointwise[0]
    assert price_work(full, F).products[0] == pytest.approx(price_work(half, F).products[0]), "these are not of bytes"


def test_weights_gathered_once_a_step_have_their_own_bytes() -> None:
    program = replace(Program(), reduce_overlap=False, gather_overlap=False)
    half, full = (price_step(stack_cases([gpt3(precision=kind, program=program)]), F) for kind in ("bf16", "fp32"))
    assert full.reduce[0] == pytest.approx((4 + 4) / (4 + 2) * half.reduce[0], rel=0.05)


def test_sums_over_copies_of_shards_take_what_their_group_takes() -> None:
    program = replace(Program(), reduce_overlap=False)
    c = stack_cases([gpt3(program=program, pp=1, tp=1, dp=64, zero=3, shard=8, num_microbatches=24)])
    block, table = stage_weights(c)
    one = replica_group(c, F).all_reduce_seconds(4 * (96 * block + table) / 8)
    assert price_step(c, F).reduce[0] == pytest.approx(one[0])


def test_copies_share_no_updates() -> None:
    """Each copy makes all updates, over its own shards."""
    one, four, fewer = price_step(
        stack_cases([gpt3(dp=dp, shard=shard) for dp, shard in ((8, 8), (32, 8), (8, 4))]), F
    ).update  # fmt: skip
    assert one == four == pytest.approx(fewer / 2)


def test_factors_lie_in_their_ranges() -> None:
    assert not list(range_problems({name: factor.value for name, factor in TIME_FACTORS.items()}))
    assert all(factor.low <= factor.value <= factor.high and factor.meaning for factor in MEMORY_FACTORS.values())
    assert list(range_problems({name: 2 * factor.high for name, factor in TIME_FACTORS.items()}))
