"""The covering arrays as they are stored, a name of a case a line: working them out takes longer than reading them.

`python -m tests.layouts.arrays` writes them anew; test_cases.py says when that is due. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.layouts.cases import FACTORS, PIPELINE_FACTORS, Case, array, compiled_cases, covering, pipeline_array

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "layout_arrays"
ARRAYS: dict[str, Callable[[], list[Case]]] = {
    "pairs": lambda: array(2, num_compiled=4),
    "triples": lambda: array(3, num_compiled=0) + compiled_cases(8, num_processes=4),
    "pipeline_pairs": lambda: pipeline_array(2),
    "pipeline_triples": lambda: pipeline_array(3),
}


@cache
def stored(name: str) -> tuple[Case, ...]:
    return tuple(map(Case.named, (FOLDER / f"{name}.txt").read_text().split()))


def few_and_the_rest(name: str) -> list[Any]:
    """A stored array as parameters of a test: `make test` has a few of its cases, the rest is wide."""
    few = each_value_once(name)
    return [pytest.param(case, id=case.name, marks=() if case in few else pytest.mark.wide) for case in stored(name)]


def beyond(name: str, fewer: str) -> list[Any]:
    """What a stored array has and a smaller one lacks."""
    return [pytest.param(case, id=case.name) for case in stored(name) if case not in stored(fewer)]


def each_value_once(name: str) -> list[Case]:
    """A few quick cases of a stored array with each model, schedule and size of an axis that quick cases have."""
    quick = tuple(case for case in stored(name) if case.num_processes <= 4 and not case.compile)
    return covering(quick, quick_factors(name), 1)


def quick_factors(name: str) -> dict[str, tuple[Any, ...]]:
    if name.startswith("pipeline"):
        return {key: PIPELINE_FACTORS[key] for key in ("model", "pp", "vp", "schedule", "balance", "tp", "dp")}
    return {key: FACTORS[key] for key in ("model", "tp", "dp", "zero", "hybrid", "sequence")}


def text(name: str) -> str:
    return "".join(f"{case.name}\n" for case in ARRAYS[name]())


if __name__ == "__main__":
    for array_name in ARRAYS:
        (FOLDER / f"{array_name}.txt").write_text(text(array_name))
