"""Bytes of the fullest rank by closed form."""

from __future__ import annotations

from typing import Any

import pytest

from lmtrain.plan.cost_model.hardware_figures import MEMORY_FACTORS, FittedFactors
from lmtrain.plan.cost_model.training_workload import RecomputedShares, stack_cases
from lmtrain.plan.run_estimates.closed_form_memory import price_memory
from tests.unit.plan.cases import gpt3

F = FittedFactors({name: factor.value for name, factor in MEMORY_FACTORS.items()})
FULL = RecomputedShares(products=1.0, attention=1.0, pointwise=1.0, collectives=1.0)
BLOCK = 12 * 12288**2


def test_what_lasts_follows_from_the_weights() -> None:
    memory = price_memory(stack_cases([gpt3(recomputed=FULL)]), F)
    held = (6 * BLOCK + 51200 * 12288) / 8
    assert float(memory.weights[0]) == pytest.approx(2 * held)
    assert float(memory.optimizer[0]) == pytest.approx(12 * held / 8)


def test_sharding_and_recompute_take_less() -> None:
    plain, sharded = (float(price_memory(stack_cases([gpt3(pp=1, tp=1, dp=1024, shard=1024, zero=zero)]), F).total[0])
                      for zero in (1, 3))  # fmt: skip
    assert sharded < plain / 3
    full, none = (price_memory(stack_cases([gpt3(recomputed=shares)]), F) for shares in (FULL, RecomputedShares()))
    assert full.activations[0] < none.activations[0] / 5


def test_interleaving_holds_more() -> None:
    one, two = (price_memory(stack_cases([gpt3(vp=vp)]), F).activations[0] for vp in (1, 2))
    assert float(two / one) == pytest.approx(1 + 15 / 32)


def test_words_of_a_decoder_that_keep_tensors_are_counted() -> None:
    words: list[dict[str, Any]] = [{}, {"extra_norms": 2}, {"qk_norm": True}]
    plain, norms, qk_norm = price_memory(stack_cases([gpt3(**word) for word in words]), F).activations
    assert plain < qk_norm < norms
    last = [price_memory(stack_cases([gpt3(pp=1, num_layers=1, capped_logits=cap)]), F).logits for cap in (False, True)]
    assert last[0] < last[1]
