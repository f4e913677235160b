"""Bytes of the fullest rank by closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmtrain.layout import Coordinate
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.plan.cost_model.hardware_figures import MEMORY_FACTORS, FittedFactors
from lmtrain.plan.cost_model.training_workload import RecomputedShares, Schedule, stack_cases
from lmtrain.plan.run_estimates.closed_form_memory import (
    FIRST,
    LAST,
    MIDDLE,
    _micro_batches_in_flight,
    _stage_memory,
    price_memory,
)
from lmtrain.plan.run_estimates.rank_memory_by_purpose import _in_flight_of_schedule, count_rank_bytes
from lmtrain.plan.run_estimates.workload_from_settings import _SCHEDULES, PlannedRun, build_case
from tests.unit.plan.cases import CONF, gpt3
from tests.unit.plan.drawn_runs import SCHEDULES, drawn_runs
from tests.unit.plan.machines import hardware_named

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


def large_decoders(count: int) -> Iterator[PlannedRun]:
    """Yield drawn runs of decoders whose matrices are large beside their norms and biases."""
    for run in drawn_runs(count, seed=2):
        if isinstance(model := run.model, GPTSettings) and run.optim.kind != "muon":
            sizes: dict[str, Any] = {"width": 640 * model.num_heads, "head_width": 128, "vocab_size": 50257}
            sizes |= {"ffn_width": 997 * run.parallel.tp, "vocab_multiple": 8192}
            model = replace(model, **sizes, bias="none", qk_norm="none", num_positions=None)
            yield replace(run, model=model, average_every_steps=0)


def test_what_lasts_is_what_the_ranks_of_a_stage_are_counted_to() -> None:
    """Compare drawn runs of any schedule, cut, precision and ZeRO level, with one table, two or a copy."""
    for run in large_decoders(70):
        cases = stack_cases([build_case(run, hardware_named("a100_80gb", CONF))])
        layout, is_folded = run.parallel.layout, run.parallel.schedule == "zb_v"
        is_even = run.model.shape.num_layers % (layout.pp * layout.vp) == 0  # else a middle one counts as the fullest
        ranks = [count_rank_bytes(run, layout.rank(Coordinate(pp, 0, 0, 0))) for pp in range(layout.pp)]
        of_position = {FIRST: ranks[:1], MIDDLE: ranks[1:-1] if is_even else [], LAST: [] if is_folded else ranks[-1:]}
        for position, counted in of_position.items():
            for exact in counted if layout.pp > 1 or position == FIRST else ():
                memory = _stage_memory(cases, F, position)
                found = {name: float(getattr(memory, name)[0]) for name in ("weights", "gradients", "optimizer")}
                expected = {name: exact[name] for name in ("weights", "gradients")}
                expected["optimizer"] = exact["masters"] + exact["moments"]
                if run.parallel.zero < 3:
                    found["gathered"], expected["gathered"] = float(memory.gathered[0]), exact["gathered"]
                assert found == pytest.approx(expected, rel=0.03), f"position {position} of {run}"


@pytest.mark.parametrize("pp", [2, 3, 4, 7])
@pytest.mark.parametrize(("schedule", "vp"), SCHEDULES)
def test_microbatches_in_flight_are_those_of_the_schedules_table(schedule: str, vp: int, pp: int) -> None:
    """Compare steps shorter than the pipeline and longer, but for short ones of zb_v, which hold less than is said."""
    places = {FIRST: [0], MIDDLE: range(1, pp - 1), LAST: [pp - 1]}
    short = {"interleaved": [pp], "zb_v": []}.get(schedule, [1, pp - 1, pp])
    for num in (*short, 2 * pp + (schedule == "interleaved"), 4 * pp):
        kind = _SCHEDULES.get(schedule, Schedule.ONE_F_ONE_B)
        cases = stack_cases([gpt3(pp=pp, vp=vp, num_microbatches=num, schedule=kind)])
        for position, ranks in places.items():
            tables = [_in_flight_of_schedule(schedule, rank, pp, vp, num) for rank in ranks]
            for weight in (0.3, 0.9) if tables else ():
                held = [(table.awaiting_backward + weight * table.awaiting_weight_half).sum(axis=1) for table in tables]
                found = [waiting + weight * halves for waiting, halves in _micro_batches_in_flight(cases, position)]
                assert np.max(found) == pytest.approx(np.max(np.concatenate(held)) / vp), (num, position, weight)
