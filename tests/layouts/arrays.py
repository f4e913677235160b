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
    pipeline_array,
    summing,
    word_array,
    word_pipeline_array,
)

# what `make test` has: each model, size of an axis, schedule and precision once, and as many of their pairs as few
# quick cases can have; what few processes cannot have, and the array itself, is left to `make test-all`
FEW = {
    "pairs": (
        "gqa-tp3-dp1-sp-first-fp32-micro1",
        "parallel-tp1-dp3-zero2-fp32-micro1-documents",
        "window-tp1-dp2-zero3-full-fp32-micro1",
        "bert-tp1-dp4-zero2-hybrid-first-fp32-micro1",
        "untied-tp4-dp1-full-fp32-micro4",
        "postnorm-tp2-dp1-sp-operators-bf16-micro1",
        "tied-tp1-dp2-zero0-fp16-micro1",
        "qwen-tp2-dp1-fp32-micro1",  # a weight that each rank holds whole and uses for its own heads
    ),
    "pipeline_pairs": (
        "deepuntied-pp2-gpipe-tp2-dp1-attention-bf16-micro2",
        "deeppost-pp2-vp2-interleaved-cost-tp1-dp1-operators-fp16-micro2",
        "deep-pp2-vp2-zb_v-tp1-dp1-fp32-micro4",
        "deepgqa-pp3-tp1-dp1-operators-fp32-micro7-documents",
        "deepbert-pp2-zb_h1-tp1-dp2-zero1-fp32-micro5",
    ),
}
FOLDER = Path(__file__).resolve().parents[1] / "golden" / "layout_arrays"
ARRAYS: dict[str, Callable[[], list[Case]]] = {
    "pairs": lambda: array(2, num_compiled=4),
    "triples": lambda: array(3, num_compiled=0) + compiled_cases(8, num_processes=4),
    "pipeline_pairs": lambda: pipeline_array(2),
    "pipeline_triples": lambda: pipeline_array(3),
    "word_pairs": lambda: word_array(2),
    "word_pipeline_pairs": lambda: word_pipeline_array(2),
}


@cache
def stored(name: str) -> tuple[Case, ...]:
    return tuple(map(Case.named, (FOLDER / f"{name}.txt").read_text().split()))


def few_and_the_rest(name: str) -> list[Any]:
    """A few quick cases as parameters of a test, and a stored array, whose others are wide; most compiled ones slow."""
    cases = dict.fromkeys([*few(name), *stored(name)])
    slow, rest = [case for case in cases if case.compile][1:], [case for case in cases if case.name not in FEW[name]]
    marks = {case: [pytest.mark.slow if case in slow else pytest.mark.wide] for case in rest}
    return [pytest.param(case, id=case.name, marks=marks.get(case, ())) for case in cases]


def few(name: str) -> list[Case]:
    return [Case.named(one) for one in FEW[name]]


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
    first = sorted(quick, key=lambda case: (case.precision != "fp32", case.microbatches))[:1]
    rest = {True: pytest.mark.wide, False: pytest.mark.slow}
    return [
        pytest.param(case, id=case.name, marks=() if case in first else rest[case.num_processes <= 2]) for case in cases
    ]


def beyond(name: str, fewer: str) -> list[Any]:
    """What a stored array has and a smaller one lacks."""
    return [pytest.param(case, id=case.name) for case in stored(name) if case not in stored(fewer)]


def quick_factors(name: str) -> dict[str, tuple[Any, ...]]:
    if name.startswith("pipeline"):
        words = ["model", "pp", "vp", "schedule", "balance", "tp", "dp", "precision"]
        return {word: PIPELINE_FACTORS[word] for word in words} | DOCUMENTS
    return {
        word: FACTORS[word] for word in ("model", "tp", "dp", "zero", "hybrid", "sequence", "precision")
    } | DOCUMENTS


def text(name: str) -> str:
    return "".join(f"{case.name}\n" for case in ARRAYS[name]())


if __name__ == "__main__":
    for array_name in ARRAYS:
        (FOLDER / f"{array_name}.txt").write_text(text(array_name))
