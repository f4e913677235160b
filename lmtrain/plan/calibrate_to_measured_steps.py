"""Calibration of a machine's data-sheet figures and cost factors to measured steps. Torch-free.

Only a few numbers are fitted, each as a multiple of itself and each regularized by how well it was known before: a data
sheet's figure hardly moves, a guess moves freely. Two runs are therefore enough to start with; more are better. Called
by `lmtrain plan --calibrate`; `machine_cost_model` by all code that predicts the time of a step on a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lmtrain.plan.cost_model.hardware_figures import (
    FittedFactors,
    Hardware,
    fitted_interval,
    fitted_memory_factors,
    fitted_time_factors,
)
from lmtrain.plan.run_estimates.simulate_pipeline import price_runs
from lmtrain.plan.run_estimates.workload_from_settings import PlannedRun
from lmtrain.plan.search.order_layouts_by_speed import CostModel

DATA_SHEET_FIGURES = ("peak_tflops", "memory_GBps", "link_GBps", "nic_GBps")
MACHINE_FACTORS = ("side_ramp", "seq_ramp", "gap_s", "link_latency_s", "hop_latency_s", "step_s", "update_bytes")
# expected error, as an exponent of e: of a data sheet's figure, of a guess, of a factor of all machines
_DATA_SHEET_ERROR, _GUESS_ERROR, _FACTOR_ERROR = 0.1, 1.0, 0.5
_NOISE = 0.05  # least relative noise of a measured step
_ROUNDS = 20
_TINY = 1e-12
_CONVERGED = 1e-3  # relative decrease of the sum of squares below which the iteration stops
_DIFFERENCE_STEP = 1e-4
_LEAST_INTERVAL = 0.03
_COVERAGE = 0.8  # share of runs that the interval must contain

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredRun:
    """A run whose step time was measured on the machine."""

    name: str
    run: PlannedRun
    step_s: float
    spread: float = 0.0  # relative spread of the run's step times; a wide spread lowers the run's weight


@dataclass(frozen=True)
class Calibration:
    """A machine fitted to runs, and the errors of its predictions before and after."""

    hardware: Hardware
    before: list[float]  # relative error of each run's prediction before the fit; 0.1 is 10% too long
    after: list[float]  # the same after a fit to the other runs only (leave-one-out)


def machine_cost_model(hardware: Hardware) -> CostModel:
    """Return the cost model for predicting runs on a machine: the shipped factors, which were fitted to published runs,
    except for those that a calibration on this machine has stored in `hardware`.
    """
    return CostModel(
        time=FittedFactors({**fitted_time_factors().values, **hardware.factors}),
        memory=fitted_memory_factors(on_cpu=hardware.device == "cpu"),
        interval=fitted_interval() if hardware.interval is None else hardware.interval,
    )


def calibrate(hardware: Hardware, runs: Sequence[MeasuredRun]) -> Calibration:
    """Fit the data-sheet figures and cost factors of a machine to the step times of measured runs. Return a
    Calibration: the fitted machine, and for each run the relative error of its prediction before the fit, and after a
    fit to all other runs (0.1: predicted 10% too long).
    """
    before, full_fit = (
        _prediction_errors(hardware, runs),
        _fit_exponents(hardware, runs, np.zeros(len(DATA_SHEET_FIGURES) + len(MACHINE_FACTORS))),
    )
    after = [
        float(
            _prediction_errors(
                _scaled_machine(hardware, _fit_exponents(hardware, [*runs[:index], *runs[index + 1 :]], full_fit)),
                [run],
            )[0]
        )
        for index, run in enumerate(runs)
    ]
    error = float(np.quantile(np.abs(np.log1p(after)), _COVERAGE))
    machine = replace(
        _scaled_machine(hardware, full_fit), interval=max(round(float(np.expm1(error)), 3), _LEAST_INTERVAL)
    )
    return Calibration(machine, before.tolist(), after)


def _prediction_errors(hardware: Hardware, runs: Sequence[MeasuredRun]) -> Vector:
    """Return the relative error of the predicted step time of each run: predicted / measured - 1, so that 0.1 is 10%
    too long.
    """
    time, _ = price_runs([run.run for run in runs], hardware, machine_cost_model(hardware).time)
    errors: Vector = time.total / np.array([run.step_s for run in runs]) - 1
    return errors


def _fit_exponents(hardware: Hardware, runs: Sequence[MeasuredRun], start: Vector) -> Vector:
    """Fit a machine to measured runs and return an array with an exponent x for each of DATA_SHEET_FIGURES, then of
    MACHINE_FACTORS: multiply the figure or factor in `hardware` by e**x. `start` holds the exponents at which the
    search begins.

    The method is damped Gauss-Newton least squares on logarithms, regularized toward the machine as given.
    """
    is_guess = hardware.device == "cpu" or hardware.unchecked
    expected_errors = np.repeat(
        (_GUESS_ERROR, _GUESS_ERROR) if is_guess else (_DATA_SHEET_ERROR, _FACTOR_ERROR),
        (len(DATA_SHEET_FIGURES), len(MACHINE_FACTORS)),
    )

    noise = np.array([max(run.spread, _NOISE) for run in runs])

    def residuals(exponents: Vector) -> Vector:
        return np.concatenate(
            [
                np.log1p(_prediction_errors(_scaled_machine(hardware, exponents), runs)) / noise,
                exponents / expected_errors,
            ]
        )

    position, current, damping = start, residuals(start), 1e-3
    for _ in range(_ROUNDS):
        slopes = np.stack(
            [
                (residuals(position + step) - current) / _DIFFERENCE_STEP
                for step in np.eye(len(position)) * _DIFFERENCE_STEP
            ],
            axis=1,
        )
        curve = slopes.T @ slopes
        step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), -slopes.T @ current)
        proposed = residuals(position + step)
        decrease = 1 - (proposed @ proposed + _TINY) / (current @ current + _TINY)
        if decrease < 0:
            damping *= 10
            continue
        position, current, damping = position + step, proposed, damping / 10
        if decrease < _CONVERGED:
            break
    return position


def _scaled_machine(hardware: Hardware, exponents: Vector) -> Hardware:
    """Return a copy of `hardware` in which each of DATA_SHEET_FIGURES, then of MACHINE_FACTORS, is multiplied by e**x,
    where x is its entry in `exponents`.
    """
    multiples = dict(zip((*DATA_SHEET_FIGURES, *MACHINE_FACTORS), np.exp(exponents).tolist(), strict=True))
    previous = machine_cost_model(hardware).time
    return replace(
        hardware,
        peak_tflops={kind: _rounded(value * multiples["peak_tflops"]) for kind, value in hardware.peak_tflops.items()},
        memory_GBps=_rounded(hardware.memory_GBps * multiples["memory_GBps"]),
        link_GBps=_rounded(hardware.link_GBps * multiples["link_GBps"]),
        nic_GBps=_rounded(hardware.nic_GBps * multiples["nic_GBps"]),
        factors={**hardware.factors, **{name: _rounded(previous[name] * multiples[name]) for name in MACHINE_FACTORS}},
    )


def _rounded(value: float) -> float:
    """Round to eight significant digits."""
    return float(f"{value:.8g}")
