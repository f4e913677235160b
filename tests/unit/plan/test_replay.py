"""A replayed pipeline agrees with closed forms without collectives, and counts FSDP's gathers and reductions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lmtrain.parallel.device_and_precision_settings import NoRecomputeSettings
from lmtrain.plan.cost_model.step_time_and_energy import price_step
from lmtrain.plan.cost_model.training_workload import stack_cases
from lmtrain.plan.run_estimates.simulate_pipeline import OperationSeconds, pipeline_seconds, price_runs, replay_step
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun, build_case
from tests.unit.plan.cases import CONF
from tests.unit.plan.machines import hardware_named, nominal
from tests.unit.plan.planned_runs import GPT3, planned

H100 = hardware_named("h100", CONF)


def run_of(**changes: Any) -> PlannedRun:
    layout = {"pp": 4, "tp": 1, "dp_shard": 1, "global_batch": 8, "recompute": NoRecomputeSettings()}
    return planned(**(layout | changes))


def test_stages_of_24_layers_take_24_times_as_long() -> None:
    """1F1B: every microbatch and a bubble of three."""
    assert replay_step(run_of(), OperationSeconds()).makespan == 24 * (8 + 3) * 3
    assert replay_step(run_of(), OperationSeconds(), num_microbatches=4).makespan == 24 * (4 + 3) * 3


def test_halves_that_nobody_waits_for_fill_the_bubble() -> None:
    assert replay_step(run_of(schedule="zb_h1"), OperationSeconds()).makespan == 24 * (8 * 3 + 3 * 1)


def test_messages_take_their_time() -> None:
    late = (
        replay_step(run_of(), OperationSeconds(send=5.0)).makespan - replay_step(run_of(), OperationSeconds()).makespan
    )
    assert late >= 2 * 3 * 5.0, "there and back through three links"


@pytest.mark.parametrize(
    ("zero", "gathers", "reduces"),
    # blocks and the rest are 97 groups; zero 3 gathers blocks for both ways and the rest once a microbatch
    [(1, 97, 97), (2, 97, 97 * 4), (3, (2 * 96 + 1) * 4, 97 * 4)],
)
def test_collectives_are_as_many_as_a_step_has(zero: int, gathers: int, reduces: int) -> None:
    run = run_of(pp=1, dp_shard=2, zero=zero)
    plain = replay_step(run, OperationSeconds()).makespan
    assert replay_step(run, OperationSeconds(gather=1.0)).makespan - plain == gathers
    assert replay_step(run, OperationSeconds(reduce=1.0)).makespan - plain == reduces


def test_tables_that_are_two_are_gathered_by_themselves() -> None:
    """The embedding's is not needed for its backward, and the head's waits for it."""
    run = run_of(pp=1, dp_shard=2, zero=3)
    model: Any = run.model
    untied = replace(run, model=replace(model, tied=False))
    times = [
        replay_step(one, OperationSeconds(gather=1.0)).makespan - replay_step(one, OperationSeconds()).makespan
        for one in (run, untied)
    ]
    assert times == [(2 * 96 + 1) * 4, (2 * 96 + 3) * 4]


def test_second_halves_reduce_what_they_made() -> None:
    """Each end has a table by itself and the rest of its stage; first halves reduce the embedding's."""
    run = run_of(schedule="zb_v", vp=2, dp_shard=2, zero=2)
    plain, talked = (replay_step(run, OperationSeconds(reduce=reduce)).busy for reduce in (0.0, 1.0))
    assert [round(b - a) for a, b in zip(plain, talked, strict=True)] == [4 * (24 + 4), 4 * 24, 4 * 24, 4 * 24]


@pytest.mark.parametrize(
    ("schedule", "vp", "balance"),
    [
        ("1f1b", 1, "layers"), ("interleaved", 5, "layers"), ("interleaved", 5, "cost"), ("zb_h1", 1, "cost"),
        ("zb_v", 2, "layers"),
    ],
)  # fmt: skip
def test_a_step_is_as_long_as_its_replay(schedule: str, vp: int, balance: str) -> None:
    """With a head, messages, and stages of one layer or two."""
    run = run_of(schedule=schedule, vp=vp, balance=balance, global_batch=64, model=replace(GPT3, num_layers=26))
    seconds = OperationSeconds(forward=1.0, input=1.2, weight=0.8, head=3.0, wait=0.1)
    assert pipeline_seconds(run, seconds) == pytest.approx(replay_step(run, seconds).makespan)


def test_chunks_of_uneven_lengths_take_longer_than_even_ones_would() -> None:
    """All ranks have 8 layers, and stand still where one of two layers follows one of one."""
    run = run_of(pp=12, vp=5, schedule="interleaved", dp_shard=1, global_batch=96)
    even = replace(run, parallel=replace(run.parallel, vp=4))
    took, best = (price_runs([one], H100, nominal())[0].bubble[0] for one in (run, even))
    assert took > 2 * best


def test_a_run_without_a_pipeline_takes_all_its_microbatches() -> None:
    run = run_of(pp=1)
    assert pipeline_seconds(run, OperationSeconds(head=2.0)) == 8 * (96 * 3 + 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_closed_form_has_all_layers_of_the_stages(schedule: str) -> None:
    """Balanced by cost, stages have three layers, two, or one and the head."""
    model = replace(GPT3, num_layers=15, width=2048, num_heads=32, vocab_size=128256)
    run = run_of(model=model, pp=8, schedule=schedule, balance="cost", global_batch=16)
    layers = [len(stage.layers) for held in run.stages for stage in held]
    assert max(layers) > layers[-1] + 1, layers
    closed = price_step(stack_cases([build_case(run, H100)]), nominal()).total[0]
    assert closed == pytest.approx(price_runs([run], H100, nominal())[0].total[0], rel=0.01)
