"""A run's pipeline replayed: closed forms without collectives, and how often FSDP gathers and reduces with them."""

from __future__ import annotations

from typing import Any

import pytest

from lmtrain.parallel.recompute_settings import NoRecomputeSettings
from lmtrain.plan.ours import Planned
from lmtrain.plan.replay import Seconds, replay
from tests.unit.plan.ours import planned


def run_of(**changes: Any) -> Planned:
    layout = {"pp": 4, "tp": 1, "dp_shard": 1, "global_batch": 8, "recompute": NoRecomputeSettings()}
    return planned(**(layout | changes))


def test_stages_of_24_layers_take_24_times_as_long() -> None:
    """1F1B: every microbatch and a bubble of three."""
    assert replay(run_of(), Seconds()).makespan == 24 * (8 + 3) * 3
    assert replay(run_of(), Seconds(), count=4).makespan == 24 * (4 + 3) * 3


def test_halves_that_nobody_waits_for_fill_the_bubble() -> None:
    assert replay(run_of(schedule="zb_h1"), Seconds()).makespan == 24 * (8 * 3 + 3 * 1)


def test_messages_take_their_time() -> None:
    late = replay(run_of(), Seconds(send=5.0)).makespan - replay(run_of(), Seconds()).makespan
    assert late >= 2 * 3 * 5.0, "there and back through three links"


@pytest.mark.parametrize(
    ("zero", "gathers", "reduces"),
    # blocks and the rest are 97 groups; zero 3 gathers blocks for both ways and the rest once a microbatch
    [(1, 97, 97), (2, 97, 97 * 4), (3, (2 * 96 + 1) * 4, 97 * 4)],
)
def test_collectives_are_as_many_as_a_step_has(zero: int, gathers: int, reduces: int) -> None:
    run = run_of(pp=1, dp_shard=2, zero=zero)
    plain = replay(run, Seconds()).makespan
    assert replay(run, Seconds(gather=1.0)).makespan - plain == gathers
    assert replay(run, Seconds(reduce=1.0)).makespan - plain == reduces


def test_second_halves_reduce_what_they_made() -> None:
    run = run_of(schedule="zb_v", vp=2, dp_shard=2, zero=2)
    plain, talked = (replay(run, Seconds(reduce=reduce)).busy for reduce in (0.0, 1.0))
    assert [round(b - a) for a, b in zip(plain, talked, strict=True)] == [4 * (24 + 2), 4 * 24, 4 * 24, 4 * 24]
