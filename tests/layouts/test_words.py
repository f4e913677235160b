"""Models with every word of a decoder's settings train at any layout as one process does.

Seeded arrays of cases have each of these models with every size of every axis, schedule, recompute and precision, with
and without documents. `python -m tests.layouts.replay NAME` runs one again and prints the comparison.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts.arrays import stored
from tests.layouts.cases import Case, by_blocks, summing
from tests.layouts.outcome import References, check, run
from tests.layouts.test_optimizers import TOLERANCE, updated
from tests.layouts.workers import Pool
from tests.marks import slow

pytestmark = pytest.mark.wide  # because: each case takes up to four processes a second

CASES = {name: stored(name) for name in ("word_pairs", "word_pipeline_pairs")}
# because: the unfused flex_attention of a CPU differentiates a cap by a backward within the backward, in which nothing
# can be computed again
CAPPED = [Case("gemma", dp=2, zero=zero, precision="fp32", documents=True) for zero in (1, 3)]
BLOCKS = by_blocks([*CAPPED, *(case for case in CASES["word_pairs"] if case.model != "gemma")])
SUMMED = summing(case for cases in CASES.values() for case in cases)
COMPILED = ["gemma-tp2-dp1-sp-bf16-micro1-compile"]
DROPOUT = ["gemma-dp2-zero0-attention-fp32-micro4-dropout", "gemma-dp2-zero3-full-fp32-micro4-documents-dropout"]


def named(cases: list[Case] | tuple[Case, ...]) -> list[object]:
    """Pipelines whose stages are cut as well are slow: the other models have those, and word_pairs has the cuts."""
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.pp > 1 and case.num_processes > 3 else [])
        for case in cases
    ]


@pytest.mark.parametrize("case", named(CASES["word_pairs"] + CASES["word_pipeline_pairs"]))
def test_a_layout_equals_one_process(case: Case, pool: Pool, references: References) -> None:
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


@pytest.mark.parametrize("case", named([case for case in BLOCKS if case.num_processes < 4]))
def test_masks_of_blocks_equal_masks_of_positions(case: Case, pool: Pool, references: References) -> None:
    """Windows in some layers, and scores with a cap, whose masks of blocks are made even where none is needed."""
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


@pytest.mark.parametrize("case", named([case for case in SUMMED if case.num_processes < 3]))
def test_products_that_sum_equal_one_process(case: Case, pool: Pool, references: References) -> None:
    """Run kernels' twins, which compute every activation and its gradient in a pass of their own."""
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", DROPOUT)
def test_capped_scores_are_dropped_as_on_one_process(name: str, pool: Pool, references: References) -> None:
    """Drop the same scores where attention is computed again."""
    wrong = check(Case.named(name), run(pool, Case.named(name)), references)
    assert not wrong, f"python -m tests.layouts.replay {name}\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", [*slow(*COMPILED)])
def test_a_compiled_block_equals_one_process(name: str, pool: Pool, references: References) -> None:
    case = Case.named(name)
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


@pytest.mark.parametrize("optim", ["adamw", "lamb", "muon"])
@pytest.mark.parametrize("name", ["gemma-tp2-dp2-zero2-sp-fp32-micro1", "olmo-tp4-dp1-fp32-micro1"])
def test_updates_are_those_of_one_process(name: str, optim: str, pool: Pool, tmp_path: Path) -> None:
    """Update norms of each head, norms over ranks, and weights that are added to 1."""
    start, right = updated(pool, Case.named(name).reference.name, optim, tmp_path / "one")
    _, found = updated(pool, name, optim, tmp_path / "found")
    for key, weight in right.items():
        assert (found[key] - weight).norm() <= TOLERANCE * (weight - start[key]).norm(), key
