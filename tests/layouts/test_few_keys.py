"""Keys and values of fewer heads than tensor-parallel ranks: ranks hold copies, which stay equal and count once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts.cases import Case
from tests.layouts.outcome import References, check, run
from tests.layouts.test_optimizers import TOLERANCE, updated
from tests.layouts.workers import Pool

pytestmark = pytest.mark.wide  # because: four and eight processes take seconds

CASES = [
    "fewkeys-tp2-fp32-micro1",  # as many as ranks
    "fewkeys-tp4-fp32-micro4",
    "fewkeys-tp8-sp-fp32-micro1",
    "fewkeys-tp4-dp2-zero3-sp-full-bf16-micro4",
    "fewkeys-tp4-dp2-zero2-operators-fp32-micro1-documents",
    "fewkeys-pp2-tp4-dp1-attention-fp16-micro4",
    "onekey-tp2-dp3-zero1-sp-fp32-micro1",
    "onekey-tp8-fp32-micro4",
    "onekey-tp4-sp-bf16-micro4-summed",
]


@pytest.mark.parametrize("name", CASES)
def test_copies_train_as_one_process_does(name: str, pool: Pool, references: References) -> None:
    case = Case.named(name)
    assert not case.problems()
    wrong = check(case, run(pool, case), references)
    assert not wrong, f"python -m tests.layouts.replay {case.name}\n" + "\n".join(wrong)


@pytest.mark.parametrize("optim", ["adamw", "lamb", "muon"])
@pytest.mark.parametrize("name", ["fewkeys-tp8-fp32-micro1", "fewkeys-tp4-dp2-zero1-sp-fp32-micro1"])
def test_updates_are_those_of_one_process(name: str, optim: str, pool: Pool, tmp_path: Path) -> None:
    start, right = updated(pool, Case.named(name).reference.name, optim, tmp_path / "one")
    _, found = updated(pool, name, optim, tmp_path / "found")
    for key, weight in right.items():
        assert (found[key] - weight).norm() <= TOLERANCE * (weight - start[key]).norm(), key
