"""The covering arrays as they are stored, a name of a case a line: working them out takes longer than reading them.

`python -m tests.layouts.arrays` writes them anew; test_cases.py says when that is due. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.layouts.cases import (
    DOCUMENTS,
    FACTORS,
    PIPELINE_FACTORS,
    Case,
    array,
    by_blocks,
    compiled_cases,
    covering,
    pipeline_array,
    summing,
)

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


def few_by_blocks(name: str) -> list[Any]:
    """The cases of a stored array that have masks, with masks of blocks.

    Not those that are compiled, as torch has no flex_attention with gradients that is compiled for a CPU.
    """
    return _first_quick(by_blocks(case for case in stored(name) if not case.compile))


def few_that_sum(name: str) -> list[Any]:
    """The cases of a stored array in which products that sum make a difference."""
    return _first_quick(summing(stored(name)))


def _first_quick(cases: list[Case]) -> list[Any]:
    """`make test` has a quick one, and those of many processes are slow: the array itself has each of them as well."""
    quick = [case for case in cases if case.num_processes <= 2 and not case.compile]
    few = sorted(quick, key=lambda case: (case.precision != "fp32", case.microbatches))[:1]
    rest = {True: pytest.mark.wide, False: pytest.mark.slow}
    return [
        pytest.param(case, id=case.name, marks=() if case in few else rest[case.num_processes <= 2]) for case in cases
    ]


def beyond(name: str, fewer: str) -> list[Any]:
    """What a stored array has and a smaller one lacks."""
    return [pytest.param(case, id=case.name) for case in stored(name) if case not in stored(fewer)]


def each_value_once(name: str) -> list[Case]:
    """A few quick cases of a stored array with each model, schedule and size of an axis that quick cases have.

    Half precision takes three times as long on a CPU, and so where nothing else has a value.
    """
    quick = tuple(case for case in stored(name) if case.num_processes <= 4 and not case.compile)
    factors = quick_factors(name)
    plain = covering(tuple(case for case in quick if case.precision == "fp32"), factors, 1)
    half = covering(quick, factors, 1, beside=plain)
    return covering((*plain, *half), factors, 1)  # what others have come to cover is left out again


def quick_factors(name: str) -> dict[str, tuple[Any, ...]]:
    if name.startswith("pipeline"):
        words = ["model", "pp", "vp", "schedule", "balance", "tp", "dp"]
        return {word: PIPELINE_FACTORS[word] for word in words} | DOCUMENTS
    return {word: FACTORS[word] for word in ("model", "tp", "dp", "zero", "hybrid", "sequence")} | DOCUMENTS


def text(name: str) -> str:
    return "".join(f"{case.name}\n" for case in ARRAYS[name]())


if __name__ == "__main__":
    for array_name in ARRAYS:
        (FOLDER / f"{array_name}.txt").write_text(text(array_name))
