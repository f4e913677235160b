"""The comparison of test_parity.py notices each bug that is planted, and nothing without it."""

from __future__ import annotations

import pytest

from tests.layouts.bugs import CASES
from tests.layouts.cases import Case
from tests.layouts.outcome import References, check, run
from tests.layouts.workers import Pool


@pytest.mark.parametrize(("bug", "name"), CASES.items(), ids=CASES.keys())
def test_a_planted_bug_is_noticed(bug: str, name: str, pool: Pool, references: References) -> None:
    case = Case.named(name)
    assert not case.problems()
    assert not references.wrong(case), "without the bug"
    wrong = check(case, run(pool, case, bug=bug), references)
    assert wrong, f"{bug} went unnoticed on {name}"
