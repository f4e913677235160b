"""Bytes of each rank by name agree with its sizes and its row of the schedule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lmtrain.parallel.device_and_precision_settings import NoRecomputeSettings
from lmtrain.placement.weight_and_activation_bytes import count_elements, placements_of_stages, rank_bytes
from lmtrain.plan.run_estimates.rank_memory_by_purpose import (
    NEED_A_GPU,
    _in_flight_of_schedule,
    count_rank_bytes,
    fullest_rank,
)
from lmtrain.schedules.pipeline_schedule import schedule_named
from lmtrain.schedules.schedule_simulator import activations_held
from tests.unit.plan.drawn_runs import drawn_runs, lasting_bytes
from tests.unit.plan.planned_runs import GPT3, planned, planned_on_cpu

NONE = NoRecomputeSettings()


def test_gpt3s_weights_are_the_papers() -> None:
    """175 billion numbers over 128 parts: 2 bytes to compute, 4 of gradients, and 12 shared by 8.

    Padding, and what each tp rank has all of, are less than 2 in 1,000.
    """
    ranks = [count_rank_bytes(planned(), rank) for rank in range(0, 1024, 64)]
    held = {name: sum(rank[name] for rank in ranks) * 8 for name in ("weights", "gradients", "masters", "moments")}
    numbers = GPT3.num_parameters + 50257 * 12288  # the copy of the tied weight
    assert held["weights"] == pytest.approx(2 * numbers, rel=0.002)
    assert held["gradients"] == pytest.approx(4 * numbers, rel=0.002)
    assert held["masters"] == pytest.approx(4 * numbers / 8, rel=0.002)
    assert held["moments"] == pytest.approx(8 * numbers / 8, rel=0.002)


def test_what_lasts_on_a_rank_is_counted_on_its_modules() -> None:
    """Any model, optimizer, precision, schedule, cut and ZeRO level, by the plan and by the table of a run's ranks."""
    rng = random.Random(1)
    for run in drawn_runs(30):
        rank = rng.randrange(run.parallel.layout.world_size)
        held, counted = lasting_bytes(run, rank), count_rank_bytes(run, rank)
        assert {name: counted[name] for name in held} == held, f"rank {rank} of {run}"
        layout, place = run.parallel.layout, run.parallel.layout.coordinate(rank)
        places = placements_of_stages(run.model, run.stages[place.pp], layout, place.dp_shard)
        row = rank_bytes(
            count_elements(places, layout, run.optim.num_slots), layout, zero=run.parallel.zero,
            work_bytes=run.number_bytes, keeps_average=run.average_every_steps > 0,
        )  # fmt: skip
        in_table = {"weights": row.work, "masters": row.masters, "moments": row.optimizer, "average": row.average}
        assert in_table == {name: held[name] for name in in_table}, f"rank {rank} of {run}"


@pytest.mark.parametrize(("schedule", "vp", "first", "last"), [("1f1b", 1, 16, 1), ("gpipe", 1, 192, 192)])
def test_activations_are_those_in_flight(schedule: str, vp: int, first: int, last: int) -> None:
    run = planned(schedule=schedule, vp=vp, recompute=NONE)
    for rank, flying in ((0, first), (1023, last)):
        (stage,) = run.stages[rank // 64]
        hidden = run.layers.activation_bytes(stage).hidden
        assert count_rank_bytes(run, rank)["activations"] == pytest.approx(flying * hidden)
    assert count_rank_bytes(run, 0)["logits"] == 0
    assert count_rank_bytes(run, 1023)["logits"] == last * run.layers.activation_bytes(run.stages[-1][0]).logits


@pytest.mark.parametrize(("schedule", "vp"), [("1f1b", 1), ("gpipe", 1), ("zb_h1", 1), ("zb_v", 2), ("interleaved", 3)])
def test_a_long_step_holds_what_its_table_does(schedule: str, vp: int) -> None:
    """Of 64 microbatches on 4 ranks few are looked at; blocks of all stages hold the same."""
    run = planned(schedule=schedule, vp=vp, pp=4, tp=1, dp_shard=1, global_batch=64, recompute=NONE)
    held = activations_held(schedule_named(schedule).table(4, vp, 64))
    for rank in (1, 2):  # without embedding or head
        if schedule.startswith("zb"):
            flying = _in_flight_of_schedule(schedule, rank, 4, vp, 64)
            assert max((flying.awaiting_backward + flying.awaiting_weight_half).sum(axis=1)) == held[rank]
        else:
            each = run.layers.activation_bytes(run.stages[rank][0]).hidden
            assert count_rank_bytes(run, rank)["activations"] == pytest.approx(held[rank] * each)


def test_a_v_holds_the_first_stage_and_the_last() -> None:
    run = planned(schedule="zb_v", vp=2, recompute=NONE)
    assert count_rank_bytes(run, 0)["logits"] > 0
    assert count_rank_bytes(run, 1023)["logits"] == 0


def test_zero_trades_what_lasts_for_what_is_gathered() -> None:
    one, two, three = (count_rank_bytes(planned(zero=zero), 0) for zero in (1, 2, 3))
    assert one["gradients"] == pytest.approx(8 * two["gradients"], rel=0.01)
    assert (three["weights"], two["weights"]) == (0, one["weights"])
    assert three["gathered"] > two["gathered"] == one["gathered"]
    assert count_rank_bytes(planned(dp_shard=1), 0)["gathered"] == 0


def test_one_microbatch_adds_up_no_gradients() -> None:
    assert (
        count_rank_bytes(planned(global_batch=8), 0)["gradients"] == count_rank_bytes(planned(zero=2), 0)["gradients"]
    )


def test_the_fullest_rank_is_the_first_of_a_pipeline_or_that_of_a_large_head() -> None:
    assert fullest_rank(planned(recompute=NONE)) == 0
    large = replace(GPT3, num_layers=16, vocab_size=2_000_000)
    assert fullest_rank(planned(large, micro_batch=4)) // 64 in (0, 15)


def test_what_needs_a_gpu_is_nothing_on_a_cpu() -> None:
    assert all(count_rank_bytes(planned_on_cpu(), 0)[name] == 0 for name in NEED_A_GPU)
    assert all(count_rank_bytes(planned(), 0)[name] > 0 for name in NEED_A_GPU)
