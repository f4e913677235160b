"""Bytes of the fullest rank by closed form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lmtrain.plan.cost_model.hardware_figures import MEMORY_FACTORS, FittedFactors
from lmtrain.plan.cost_model.training_workload import RecomputedShares, stack_cases
from lmtrain.plan.run_estimates.closed_form_memory import price_memory
from lmtrain.plan.run_estimates.rank_memory_by_purpose import count_rank_bytes
from lmtrain.plan.run_estimates.workload_from_settings import build_case
from tests.unit.plan.cases import CONF, gpt3
from tests.unit.plan.machines import hardware_named
from tests.unit.plan.planned_runs import GPT3, planned

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


@pytest.mark.parametrize(("schedule", "pp", "vp"), [
    ("1f1b", 1, 1), ("1f1b", 4, 1), ("zb_h1", 4, 1), ("zb_v", 4, 2), ("interleaved", 4, 2),
])  # fmt: skip
@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_state_are_those_that_the_fullest_rank_counts(schedule: str, pp: int, vp: int, tied: bool) -> None:
    """A large vocabulary, of whose two tables a rank has none, one or both."""
    model = replace(GPT3, num_layers=16, width=1024, num_heads=16, vocab_size=400_000, tied=tied)
    run = planned(model, schedule=schedule, pp=pp, vp=vp, tp=2, dp_shard=2, zero=1, global_batch=32)
    memory = price_memory(stack_cases([build_case(run, hardware_named("a100_80gb", CONF))]), F)
    ranks = [count_rank_bytes(run, rank) for rank in range(0, pp * 4, 2)]
    exact = max(ranks, key=lambda rank: rank["weights"])
    assert float(memory.weights[0]) == pytest.approx(exact["weights"], rel=0.03)
    assert float(memory.gradients[0]) == pytest.approx(exact["gradients"], rel=0.03)
    assert float(memory.optimizer[0]) == pytest.approx(exact["masters"] + exact["moments"], rel=0.03)
