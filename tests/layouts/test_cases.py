"""The arrays cover what they say, within their bounds, and every case can be called by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.layouts.arrays import ARRAYS, few, quick_factors, stored
from tests.layouts.cases import (
    DOCUMENTS,
    FACTORS,
    MODELS,
    PIPELINE_FACTORS,
    Case,
    array,
    means_something,
    pipeline_array,
    pipeline_space,
    space,
    with_documents,
)


def covered(cases: list[Case], strength: int, factors: Iterable[str] = FACTORS) -> set[tuple[tuple[str, object], ...]]:
    return {
        tuple((f, getattr(case, f)) for f in chosen) for case in cases for chosen in combinations(factors, strength)
    }


@pytest.mark.slow
@pytest.mark.parametrize(("strength", "most"), [(2, 60), (3, 300)])
def test_an_array_covers_every_legal_combination(strength: int, most: int) -> None:
    cases = array(strength, num_compiled=4)
    assert len(cases) <= most
    assert sum(case.compile for case in cases) == 4
    factors = FACTORS | DOCUMENTS
    assert covered(list(with_documents(space())), strength, factors) <= covered(cases, strength, factors)
    assert len({case.name for case in cases}) == len(cases)
    assert not [problem for case in cases for problem in case.problems()]


@pytest.mark.slow
@pytest.mark.parametrize(("strength", "most"), [(2, 65), (3, 400)])
def test_a_pipeline_array_covers_every_legal_combination(strength: int, most: int) -> None:
    cases = pipeline_array(strength)
    assert len(cases) <= most
    factors = PIPELINE_FACTORS | DOCUMENTS
    assert covered(list(with_documents(pipeline_space())), strength, factors) <= covered(cases, strength, factors)
    assert not [problem for case in cases for problem in case.problems()]
    assert all(Case.named(case.name) == case for case in cases)
    assert {case.num_processes for case in cases} <= set(range(2, 9))


def test_zero_bubble_alone_is_refused_what_others_may() -> None:
    """The counts of docs/explanation/pipelines.md."""
    schedules: list[tuple[str, int]] = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2)]
    copies = [(1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]
    cases = [
        Case("deep", pp=2, vp=vp, schedule=schedule, dp=dp, zero=zero, tp=tp, sequence=sequence, recompute=recompute,
             compile=compile)
        for (schedule, vp), (dp, zero), (tp, sequence), recompute, compile in product(
            schedules, copies, [(1, False), (2, False), (2, True)], FACTORS["recompute"], (False, True)
        )
    ]  # fmt: skip
    refused = [case for case in cases if case.problems()]
    assert (len(cases), len(refused)) == (750, 276)
    halves = [case for case in cases if case.schedule in ("zb_h1", "zb_v")]
    why = [[case.recompute != "none", case.compile, case.zero == 3] for case in halves]
    assert refused == [case for case, reasons in zip(halves, why, strict=True) if any(reasons)]
    counts = [sum(reason) for reason in zip(*why, strict=True)]
    assert counts == [240, 150, 60]
    page = (Path(__file__).parents[2] / "docs/explanation/pipelines.md").read_text().partition("## What is refused")[2]
    assert "there are 750 combinations" in page
    assert "276 of them are refused" in page
    assert [int(count) for count in re.findall(r"^\|.* \| (\d+) \|", page, re.MULTILINE)] == counts


@pytest.mark.slow
def test_an_array_is_the_same_every_time() -> None:
    assert array(2, num_compiled=4) == array(2, num_compiled=4)
    assert array(2, num_compiled=4) != array(2, num_compiled=4, seed=1)


@pytest.mark.wide
def test_every_layout_of_up_to_eight_processes_is_there() -> None:
    assert {(case.tp, case.dp) for case in space()} == {
        (1, 1), (1, 2), (1, 3), (1, 4), (1, 8), (2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (4, 1), (4, 2), (8, 1),
    }  # fmt: skip
    assert {case.model for case in space() if case.tp == 8} == {"tied", "parallel", "window", "bert"}


def test_settings_say_what_is_illegal() -> None:
    assert "num_kv_heads" in " ".join(Case("gqa", tp=8).problems())
    assert "ffn_width" in " ".join(Case("parallel", tp=3).problems()) or Case("parallel", tp=3).problems()


@pytest.mark.slow
@pytest.mark.parametrize("name", ARRAYS)
def test_the_stored_arrays_are_those_of_the_space(name: str) -> None:
    """And a name is the case."""
    assert list(stored(name)) == ARRAYS[name](), "run `python -m tests.layouts.arrays`"


@pytest.mark.parametrize(
    ("name", "more_processes"), [("pairs", {("tp", 8), ("dp", 8)}), ("pipeline_pairs", {("pp", 4)})]
)
def test_make_test_has_each_axis_schedule_and_precision(name: str, more_processes: set[tuple[str, object]]) -> None:
    cases, factors = few(name), quick_factors(name)
    assert not [problem for case in cases for problem in case.problems()]
    in_array = covered(list(stored(name)), 1, factors)
    assert in_array == {((factor, value),) for factor, values in factors.items() for value in values}
    left_out = in_array - covered(cases, 1, factors)
    assert left_out == {(value,) for value in more_processes}


@pytest.mark.parametrize(
    ("name", "word"), [("gtp-tp2-fp32", "tied"), ("tied-tp2-fp33", "fp33"), ("tied-tp2-dpx", "dpx")]
)
def test_a_wrong_name_is_told(name: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Case.named(name)


def test_what_means_nothing_has_no_name_of_its_own() -> None:
    assert all(means_something(Case(model)) for model in MODELS)
    assert not means_something(Case("tied", sequence=True))
    assert not means_something(Case("tied", zero=3))
    assert not means_something(Case("tied", dp=2, hybrid=True))
    assert not means_something(Case("tied", dp=4, zero=0, hybrid=True))
