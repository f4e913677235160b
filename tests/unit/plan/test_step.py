"""A step's seconds: what hides behind what, and that no factor has left its range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmtrain.plan.case import Again, Case, Program, columns
from lmtrain.plan.factors import FACTORS, MEMORY_FACTORS
from lmtrain.plan.step import price_step
from tests.unit.plan.cases import gpt3
from tests.unit.plan.machines import nominal, range_problems

F = nominal()


def _program(trait: str, on: bool) -> Program:
    changes: dict[str, Any] = {trait: on}
    return replace(Program(), **changes)


def total(case: Case) -> float:
    return float(price_step(columns([case]), F).total[0])


def test_gpt3_on_1024_a100_takes_about_the_published_time() -> None:
    full = Again(products=1.0, attention=1.0, pointwise=1.0, collectives=1.0)
    assert total(gpt3(again=full)) == pytest.approx(32.0, rel=0.2)  # Megatron-LM's own note: around 32 seconds


def test_parts_add_up() -> None:
    step = price_step(columns([gpt3(), gpt3(pp=1, dp=128, zero=3, shard=128, num_microbatches=12)]), F)
    assert np.all(step.bubble >= -1e-9)
    assert np.all(step.total > step.compute)


@pytest.mark.parametrize("trait", ["reduce_overlap", "gather_overlap", "send_overlap", "fused_gradients"])
def test_what_overlaps_or_is_fused_saves_time(trait: str) -> None:
    without, with_it = (gpt3(program=_program(trait, on)) for on in (False, True))
    assert total(with_it) < total(without)


def test_factors_lie_in_their_ranges() -> None:
    assert not list(range_problems({name: factor.value for name, factor in FACTORS.items()}))
    assert all(factor.low <= factor.value <= factor.high and factor.meaning for factor in MEMORY_FACTORS.values())
    assert list(range_problems({name: 2 * factor.high for name, factor in FACTORS.items()}))
