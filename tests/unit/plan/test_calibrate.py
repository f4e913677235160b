"""Calibration recovers the figures that produced some steps, and each run is tested against a fit to the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lmtrain.config.compose_run_settings import conf_dir
from lmtrain.models.gpt_settings import GPTSettings
from lmtrain.parallel.device_and_precision_settings import Fp32Settings, NoRecomputeSettings
from lmtrain.plan.calibrate_to_measured_steps import MeasuredRun, calibrate, machine_cost_model
from lmtrain.plan.cost_model.hardware_figures import Hardware, fitted_interval, fitted_time_factors
from lmtrain.plan.cost_model.step_time_and_energy import price_step
from lmtrain.plan.cost_model.training_workload import stack_cases
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun, build_case
from tests.unit.plan.machines import hardware_named
from tests.unit.plan.planned_runs import planned

CPU = hardware_named("cpu", conf_dir() / "hardware")
TRUE = replace(CPU, peak_tflops={"fp32": 0.03}, memory_GBps=6.0, factors={"gap_s": 8e-6, "step_s": 0.02})


def run(width: int, seq_len: int, **layout: int) -> PlannedRun:
    model = GPTSettings(num_layers=4, width=width, num_heads=4, vocab_size=512, seq_len=seq_len)
    axes = {"pp": 1, "tp": 1, "dp_shard": 1} | layout
    return planned(
        model, precision=Fp32Settings(), recompute=NoRecomputeSettings(), micro_batch=4, global_batch=8, **axes
    )


RUNS = [run(64, 64), run(256, 64, dp_shard=2), run(256, 128), run(64, 256)]


def measured(hardware: Hardware, count: int) -> list[MeasuredRun]:
    """Return the times of the first `count` runs; each run more costs a fit more."""
    runs = RUNS[:count]
    times = price_step(
        stack_cases([build_case(one, hardware) for one in runs]), machine_cost_model(hardware).time
    ).total
    return [
        MeasuredRun(str(number), one, float(time)) for number, (one, time) in enumerate(zip(runs, times, strict=True))
    ]


def test_a_machine_is_found_again_from_its_steps() -> None:
    found = calibrate(CPU, measured(TRUE, 4))
    assert np.median(np.abs(found.before)) > 0.2
    assert np.max(np.abs(found.after)) < 0.05
    assert found.hardware.name == "cpu"
    assert found.hardware.interval is not None
    assert found.hardware.interval >= 0.03


def test_what_fits_already_stays() -> None:
    found = calibrate(CPU, measured(CPU, 2))
    assert found.hardware.memory_GBps == pytest.approx(CPU.memory_GBps, rel=1e-3)
    assert found.hardware.interval == pytest.approx(0.03)


def test_a_run_is_judged_by_the_others_alone() -> None:
    """The other runs know nothing of what made this one slow."""
    slow, other = measured(CPU, 2)
    found = calibrate(CPU, [replace(slow, step_s=1.25 * slow.step_s), other])
    assert found.before == pytest.approx([0.8 - 1, 0.0])
    assert found.after[0] == pytest.approx(found.before[0], abs=0.002)


def test_a_data_sheet_is_believed_more_than_a_guess() -> None:
    slow = [replace(one, step_s=2 * one.step_s) for one in measured(CPU, 2)]
    guessed, known = (calibrate(replace(CPU, generation=kind), slow).hardware for kind in ("cpu", "hopper"))
    assert guessed.peak_tflops["fp32"] < 0.7 * CPU.peak_tflops["fp32"]
    assert known.peak_tflops["fp32"] > 0.9 * CPU.peak_tflops["fp32"]


def test_a_machine_has_the_factors_of_all_unless_it_has_its_own() -> None:
    assert machine_cost_model(CPU).time.values == fitted_time_factors().values
    assert machine_cost_model(CPU).interval == fitted_interval()
    own = machine_cost_model(replace(CPU, factors={"gap_s": 9e-6}, interval=0.05))
    assert (own.time["gap_s"], own.interval) == (9e-6, 0.05)
