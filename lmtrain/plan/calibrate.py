"""Calibration of a machine's figures and factors to measured steps. Torch-free.

Only a few numbers are fitted, each as a multiple of itself and each regularized by how well it was known before: a data
sheet's figure hardly moves, a guess moves freely. Two runs are therefore enough to start with; more are better. Called
by `lmtrain plan --calibrate`; `prices_of` by all code that prices a step on a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lmtrain.plan.price.hardware import Factors, Hardware, fitted, fitted_memory, interval
from lmtrain.plan.run_model.replay import price_runs
from lmtrain.plan.run_model.run import Planned
from lmtrain.plan.search.rank import Prices

FIGURES = ("peak_tflops", "memory_GBps", "link_GBps", "nic_GBps")
FACTORS_HERE = ("side_ramp", "seq_ramp", "gap_s", "link_latency_s", "hop_latency_s", "step_s", "update_bytes")
# expected error, as an exponent of e: of a data sheet's figure, of a guess, of a factor of all machines
_KNOWN, _GUESSED, _FITTED = 0.1, 1.0, 0.5
_NOISE = 0.05  # least relative noise of a measured step
_ROUNDS = 20
_NOTHING = 1e-12
_ENOUGH = 1e-3  # relative decrease of the sum of squares below which the iteration stops
_STEP = 1e-4
_LEAST_INTERVAL = 0.03
_HELD = 0.8  # share of runs that the interval must contain

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    name: str
    run: Planned
    step_s: float
    spread: float = 0.0  # relative spread of the run's step times; a wide spread lowers the run's weight


@dataclass(frozen=True)
class Calibrated:
    hardware: Hardware
    before: list[float]  # relative error of each run's prediction before the fit; 0.1 is 10% too long
    after: list[float]  # the same after a fit to the other runs only (leave-one-out)


def prices_of(hardware: Hardware) -> Prices:
    """Return the factors of all machines, overridden by those that were fitted on this machine."""
    time = Factors({**fitted().values, **hardware.factors})
    memory = fitted_memory(on_cpu=hardware.device == "cpu")
    return Prices(time=time, memory=memory, interval=interval() if hardware.interval is None else hardware.interval)


def calibrate(hardware: Hardware, runs: Sequence[Measured]) -> Calibrated:
    """Fit the machine to all runs, and judge each run by a fit to all other runs."""
    before, whole = _errors(hardware, runs), _fit(hardware, runs, np.zeros(len(FIGURES) + len(FACTORS_HERE)))
    after = [
        float(_errors(_moved(hardware, _fit(hardware, [*runs[:number], *runs[number + 1 :]], whole)), [one])[0])
        for number, one in enumerate(runs)
    ]
    spread = float(np.quantile(np.abs(np.log1p(after)), _HELD))
    machine = replace(_moved(hardware, whole), interval=max(round(float(np.expm1(spread)), 3), _LEAST_INTERVAL))
    return Calibrated(machine, before.tolist(), after)


def _errors(hardware: Hardware, runs: Sequence[Measured]) -> Vector:
    time, _ = price_runs([one.run for one in runs], hardware, prices_of(hardware).time)
    found: Vector = time.total / np.array([one.step_s for one in runs]) - 1
    return found


def _fit(hardware: Hardware, runs: Sequence[Measured], start: Vector) -> Vector:
    """Return, for each number, the exponent of e by which it changes, starting the search at `start`.

    The method is damped Gauss-Newton least squares on logarithms, regularized toward the machine as given.
    """
    guess = hardware.device == "cpu" or hardware.unchecked
    widths = np.repeat((_GUESSED, _GUESSED) if guess else (_KNOWN, _FITTED), (len(FIGURES), len(FACTORS_HERE)))

    noise = np.array([max(one.spread, _NOISE) for one in runs])

    def residuals(moved: Vector) -> Vector:
        return np.concatenate([np.log1p(_errors(_moved(hardware, moved), runs)) / noise, moved / widths])

    at, now, damping = start, residuals(start), 1e-3
    for _ in range(_ROUNDS):
        slopes = np.stack([(residuals(at + step) - now) / _STEP for step in np.eye(len(at)) * _STEP], axis=1)
        curve = slopes.T @ slopes
        step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), -slopes.T @ now)
        then = residuals(at + step)
        gained = 1 - (then @ then + _NOTHING) / (now @ now + _NOTHING)
        if gained < 0:
            damping *= 10
            continue
        at, now, damping = at + step, then, damping / 10
        if gained < _ENOUGH:
            break
    return at


def _moved(hardware: Hardware, by: Vector) -> Hardware:
    """Return the machine with each figure and factor multiplied by e to the power of its entry in `by`."""
    times = dict(zip((*FIGURES, *FACTORS_HERE), np.exp(by).tolist(), strict=True))
    was = prices_of(hardware).time
    return replace(
        hardware,
        peak_tflops={kind: _short(value * times["peak_tflops"]) for kind, value in hardware.peak_tflops.items()},
        memory_GBps=_short(hardware.memory_GBps * times["memory_GBps"]),
        link_GBps=_short(hardware.link_GBps * times["link_GBps"]),
        nic_GBps=_short(hardware.nic_GBps * times["nic_GBps"]),
        factors={**hardware.factors, **{name: _short(was[name] * times[name]) for name in FACTORS_HERE}},
    )


def _short(value: float) -> float:
    return float(f"{value:.8g}")
