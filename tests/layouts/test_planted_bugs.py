"""The comparison of test_parity.py notices each bug that is planted, and nothing without it."""

from __future__ import annotations

import pytest

from tests.layouts.bugs import CASES
from tests.layouts.cases import Case
from tests.layouts.outcome import References, check, run
from tests.layouts.workers import Pool

# one that shows in the norm alone, which is looked at last; the others show in gradients too
SOON = {"replicated_weight_counted_for_each_rank"}


@pytest.mark.parametrize(
    ("bug", "name"),
    [pytest.param(*one, id=one[0], marks=[pytest.mark.wide] * (one[0] not in SOON)) for one in CASES.items()],
)
def test_a_planted_bug_is_noticed(bug: str, name: str, pool: Pool, references: References) -> None:
    case = Case.named(name)
    assert not case.problems()
    assert not references.wrong(case), "without the bug"
    wrong = check(case, run(pool, case, bug=bug), references)
    assert wrong, f"{bug} went unnoticed on {name}"
