"""Power between idle and full load, and the cost in dollars."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lmtrain.plan.cost_model.hardware_figures import fitted_time_factors
from lmtrain.plan.cost_model.step_time_and_energy import (
    COMPUTE_POWER_SHARE,
    IDLE_POWER_SHARE,
    busy_share,
    dollars,
    price_step,
    watts,
)
from lmtrain.plan.cost_model.training_workload import stack_cases
from lmtrain.plan.run_estimates.workload_from_settings import build_case
from tests.unit.plan.ranked_run import LARGE, h100, run_of


def test_a_device_that_waits_draws_less_but_not_much_less() -> None:
    run = run_of(LARGE, 64)
    cases = stack_cases([
        build_case(replace(run, parallel=replace(run.parallel, tp=tp, dp_shard=64 // tp)), h100()) for tp in (1, 32)
    ])  # fmt: skip
    time = price_step(cases, fitted_time_factors())
    busy, power = busy_share(time), watts(time, h100())
    assert 0 < busy[1] < busy[0] < 1
    assert power == pytest.approx(700 * (IDLE_POWER_SHARE + COMPUTE_POWER_SHARE * busy))
    assert power[1] > 0.75 * power[0]


def test_a_machine_whose_power_is_not_known_has_none() -> None:
    time = price_step(stack_cases([build_case(run_of(LARGE, 8), h100())]), fitted_time_factors())
    assert np.array_equal(watts(time, replace(h100(), power_W=0.0)), [0.0])


def test_dollars_are_hours_of_all_devices() -> None:
    assert dollars(86400, 1024, 2.5) == pytest.approx(24 * 1024 * 2.5)
