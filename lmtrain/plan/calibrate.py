"""A machine's figures and factors, fitted to steps that were measured on it. Torch-free.

Few numbers move, each by a share of itself, and each is held near to what it was by how well it was known: a figure of
a data sheet hardly, a guess freely. So two runs are enough to try, and more of them are better. Called by
`lmtrain plan --calibrate`; `prices_of` by all who price a step on a machine.
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
# how far a number may be off, as a power of e: of a data sheet's figure, of a guess, of a factor of all machines
_KNOWN, _GUESSED, _FITTED = 0.1, 1.0, 0.5
_NOISE = 0.05  # of a measured step, at the least
_ROUNDS = 20
_NOTHING = 1e-12
_ENOUGH = 1e-3  # of the sum of squares, gained in a round: then no more of them
_STEP = 1e-4
_LEAST_INTERVAL = 0.03
_HELD = 0.8  # of all runs, within an interval

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    name: str
    run: Planned
    step_s: float
    spread: float = 0.0  # of its steps' times, as a share of them: what spreads widely says less


@dataclass(frozen=True)
class Calibrated:
    hardware: Hardware
    before: list[float]  # of each run, what the planner said beside what was measured: 0.1 is a tenth too long
    after: list[float]  # the same with figures that were fitted to the other runs alone


def prices_of(hardware: Hardware) -> Prices:
    """Return the prices of all machines, with the factors that runs on this one have shown."""
    time = Factors({**fitted().values, **hardware.factors})
    memory = fitted_memory(on_cpu=hardware.device == "cpu")
    return Prices(time=time, memory=memory, interval=interval() if hardware.interval is None else hardware.interval)


def calibrate(hardware: Hardware, runs: Sequence[Measured]) -> Calibrated:
    """Fit a machine to all runs; judge each run by a fit to the others."""
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
    """Least squares of logarithms (Gauss and Newton, damped), drawn to the machine as it was.

    Gives for each number the power of e that it changes by, beginning at `start`.
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
    """Return the machine with each number multiplied by a power of e."""
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
