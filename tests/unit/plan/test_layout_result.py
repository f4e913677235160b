"""The parts of a layout's result add up, and a slower layout's result names the reason."""

from __future__ import annotations

from itertools import islice

import pytest

from lmtrain.config.compose_run_settings import compose
from lmtrain.parallel.device_and_precision_settings import ComputeSettings, Fp32Settings, NoRecomputeSettings
from lmtrain.plan.run_estimates.closed_form_memory import GIB
from lmtrain.plan.run_estimates.simulate_pipeline import price_runs
from lmtrain.plan.search.order_layouts_by_speed import SHARDING_COLUMNS, CostModel
from lmtrain.plan.search.predict_layout_cost import (
    STEP_PARTS,
    LayoutResult,
    best_by_pp_and_tp,
    price_layouts,
    results_at,
    too_large_results,
    why_slower,
)
from lmtrain.train.run_config import RunConfig
from tests.unit.plan.planned_runs import planned
from tests.unit.plan.ranked_run import LARGE, h100, ranked


def best(count: int = 3) -> list[LayoutResult]:
    found = ranked()
    return results_at(found, islice(found.iter_fitting(found.fastest, SHARDING_COLUMNS), count))


def test_parts_add_up_to_the_step_and_names_to_the_memory() -> None:
    found = ranked()
    for place, one in zip(found.iter_fitting(found.fastest, SHARDING_COLUMNS), best(5), strict=False):
        assert one.seconds == pytest.approx(found.seconds[place])
        assert one.total_bytes == found.count_bytes(place)
        assert min(one.parts.values()) >= 0
        assert set(one.parts) == set(STEP_PARTS)


def test_messages_and_cuts_are_no_computation() -> None:
    run = planned(vp=2, schedule="interleaved", recompute=NoRecomputeSettings())
    (one,) = price_layouts([run], h100(), CostModel())
    time, _ = price_runs([run], h100(), CostModel().time)
    assert one.seconds == pytest.approx(time.total[0])
    assert min(one.parts["sends"], one.parts["tp"], one.parts["bubble"]) > 0
    assert one.exposed_share * one.seconds == pytest.approx(
        sum(one.parts[name] for name in ("tp", "sends", "sharded", "reduce"))
    )


def test_rates_follow_from_the_step() -> None:
    one = best()[0]
    assert one.gpus == 16
    assert one.tokens_per_s == pytest.approx(64 * 2048 / one.seconds)
    assert one.mfu == pytest.approx(LARGE.shape.flops_per_token() * one.tokens_per_s / (16 * 989.4e12))
    assert one.joules_per_token == pytest.approx(one.watts * 16 * one.seconds / (64 * 2048))
    assert 0.8 * 700 < one.watts < 700
    low, high = one.interval_s
    assert low < one.seconds < high
    assert one.seconds / low == pytest.approx(high / one.seconds)


def test_products_that_are_cut_to_tf32_are_a_share_of_its_peak() -> None:
    run = planned(precision=Fp32Settings(), compute=ComputeSettings(tf32=True))
    (one,) = price_layouts([run], h100(), CostModel())
    assert one.mfu == pytest.approx(run.shape.flops_per_token() * one.tokens_per_s / (1024 * 494.7e12))


def test_tokens_without_a_score_do_no_work_in_the_head() -> None:
    """A masked model scores 0.15 of its tokens, so a plan counts the output layer of those alone, as a run does."""
    run = planned(scored_share=0.15)
    (one,) = price_layouts([run], h100(), CostModel())
    flops = run.shape.flops_per_token() - 0.85 * 6 * run.shape.width * run.shape.vocab_size
    assert one.mfu == pytest.approx(flops * one.tokens_per_s / (1024 * 989.4e12))
    bert = compose(RunConfig, ["model=bert_tiny", "data.path=x", "model.vocab_size=1000"])
    share = bert.data.scored_share(bert.seq_len)
    assert share < 0.2
    head = 6 * bert.model.shape.width * 1000
    assert bert.flops_per_token(bert.model) == pytest.approx(bert.model.shape.flops_per_token() - (1 - share) * head)


def test_why_a_layout_lost_is_the_part_that_grew_most() -> None:
    first, *others = best(8)
    for other in others:
        more = {name: other.parts[name] - first.parts[name] for name in STEP_PARTS}
        worst = max(more, key=lambda name: more[name])
        assert why_slower(other, first).startswith(f"{STEP_PARTS[worst]} +")


def test_the_map_has_the_fastest_of_each_place_or_what_it_would_need() -> None:
    cells = best_by_pp_and_tp(ranked())
    assert set(cells) == {(pp, tp) for pp in (1, 2, 4, 8) for tp in (1, 2, 4, 8, 16) if pp * tp <= 16}
    fastest = min((one for one in cells.values() if isinstance(one, LayoutResult)), key=lambda one: one.seconds)
    assert fastest.seconds == pytest.approx(best()[0].seconds)
    small = best_by_pp_and_tp(ranked(memory_GiB=8.0))
    needs = [one for one in small.values() if isinstance(one, float)]
    assert needs
    assert all(one > 8 * 0.92 * GIB for one in needs)


def test_where_nothing_fits_the_smallest_are_shown() -> None:
    found = ranked(memory_GiB=1.0)
    assert found.best_index is None
    shown = list(too_large_results(found, 3))
    assert len(shown) == 3
    assert shown[0].total_bytes <= found.count_bytes(int(found.estimated_bytes.argmin()))
    assert shown[0].total_bytes <= shown[1].total_bytes <= shown[2].total_bytes


def test_what_crosses_a_switch_is_not_said_to_miss_by_bytes() -> None:
    found = ranked(memory_GiB=1.0, switch=4)
    shown = [one.run.parallel for one in too_large_results(found, 3)]
    assert all(one.dp_shard * one.tp <= 4 for one in shown)
    assert len(shown) == 3
    assert {tp for _, tp in best_by_pp_and_tp(found)} == {1, 2, 4}


def test_facts_are_plain_data() -> None:
    facts = best()[0].to_dict()
    assert facts["parallel"]["tp"] == best()[0].run.parallel.tp
    assert facts["step_s_80_percent"][0] < facts["step_s"] < facts["step_s_80_percent"][1]
    assert sum(facts["memory_bytes"].values()) == pytest.approx(facts["held_bytes"])
