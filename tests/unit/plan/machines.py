"""The machines of conf/hardware by name, and the ranges of factors, for tests and benchmarks of the planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lmtrain.plan.cost_model.hardware_figures import TIME_FACTORS, Factor, FittedFactors, Hardware


def nominal() -> FittedFactors:
    return FittedFactors({name: factor.value for name, factor in TIME_FACTORS.items()})


def range_problems(values: Mapping[str, float], factors: Mapping[str, Factor] = TIME_FACTORS) -> Iterator[str]:
    """What a value may not be, and names that are missing or too many."""
    for name in sorted(set(values) ^ set(factors)):
        yield f"{name} is {'no factor' if name in values else 'missing'}"
    for name, factor in factors.items():
        if name in values and not factor.low <= values[name] <= factor.high:
            yield f"{name}={values[name]:g} is outside {factor.low:g} to {factor.high:g}"


def read_hardware(path: Path) -> Hardware:
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    known = {field.name for field in dataclasses.fields(Hardware)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"{path}: {', '.join(unknown)} is no fact of a machine")
    return Hardware(name=path.stem, **{key: value for key, value in values.items() if key != "name"})


@cache
def hardware_named(name: str, folder: Path) -> Hardware:
    return read_hardware(folder / f"{name}.yaml")
