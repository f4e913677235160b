"""Fits named factors to logarithms of predicted over published figures, each held near its nominal value.

Called by plan_score.py (times) and plan_memory.py (bytes).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from lmtrain.plan.cost_model.hardware_figures import FITTED_FILE, Factor, FittedFactors

Floats = NDArray[np.float64]
Residuals = Callable[[FittedFactors], Floats]
PULL = 0.003  # how strongly a factor is held: a quarter of its range counts as one unit
NEAR = 0.05  # errors beyond this count less and less


def fit(residuals: Residuals, factors: Mapping[str, Factor], weights: Floats, *, rounds: int = 20) -> FittedFactors:
    """Levenberg-Marquardt with weights that shrink for far-off rows."""
    names = list(factors)
    low, high, nominal = (np.array([getattr(factors[n], key) for n in names]) for key in ("low", "high", "value"))
    scale = (high - low) / 4

    def errors(values: Floats) -> Floats:
        return residuals(FittedFactors(dict(zip(names, values.tolist(), strict=True))))

    def cost(values: Floats, r: Floats) -> float:
        far = np.sqrt(1 + (r / NEAR) ** 2) - 1
        return float((weights * NEAR**2 * far).sum() + PULL * (((values - nominal) / scale) ** 2).sum())

    x, damp = nominal.copy(), 1e-2
    r = errors(x)
    best = cost(x, r)
    for _ in range(rounds):
        step = 1e-3 * scale
        moved = [errors(x + np.eye(len(x))[k] * step) for k in range(len(x))]
        jacobian = np.stack([(one - r) / step[k] for k, one in enumerate(moved)], 1)
        w = weights / np.sqrt(1 + (r / NEAR) ** 2)
        normal = (jacobian * w[:, None]).T @ jacobian + np.diag(PULL / scale**2)
        gradient = (jacobian * w[:, None]).T @ r + PULL * (x - nominal) / scale**2
        before = best
        for _ in range(6):
            move = np.linalg.solve(normal + damp * np.diag(np.diag(normal)), -gradient)
            trial = np.clip(x + move, low, high)
            trial_r = errors(trial)
            found = cost(trial, trial_r)
            if found < best:
                x, r, best, damp = trial, trial_r, found, damp / 3
                break
            damp *= 4
        if before - best < 1e-5 * best:
            break
    return FittedFactors(dict(zip(names, x.tolist(), strict=True)))


def root_weights(groups: Sequence[object]) -> Floats:
    """A source counts as the square root of its rows: 300 of one study are not 300 sources."""
    counts = Counter(groups)
    return np.array([counts[group] ** -0.5 for group in groups])


HEADER = (
    "# What published runs make of the numbers in hardware_figures.py. Written by plan_score.py and plan_memory.py.\n"
)


def store(section: str, value: float | Mapping[str, float]) -> None:
    """One section of the planner's file of fitted numbers; the others stay."""
    found: dict[str, Any] = yaml.safe_load(FITTED_FILE.read_text(encoding="utf-8")) if FITTED_FILE.exists() else {}
    short = round(value, 4) if isinstance(value, float) else {k: float(f"{v:.4g}") for k, v in value.items()}
    text = yaml.safe_dump(found | {section: short}, sort_keys=False)
    FITTED_FILE.write_text(HEADER + text, encoding="utf-8")


def print_factors(found: FittedFactors, factors: Mapping[str, Factor]) -> None:
    for name, value in found.values.items():
        factor = factors[name]
        edge = " at its edge" if value in (factor.low, factor.high) else ""
        print(f"    {name:20} {value:10.4g}  [{factor.low:g}, {factor.high:g}]{edge}")
