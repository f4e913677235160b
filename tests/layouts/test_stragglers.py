"""A rank or a link that is slowed is named, its neighbours, which only wait, are not; whatever kind of copies they are.

Short versions of tests/benchmarks/stragglers.py, which counts in how many steps: how long blocks sleep is this
machine's business, so a slow one is given many steps here.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks.stragglers import ran
from tests.layouts.workers import Pool

STEPS = 120


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {"rank": 1, "span": "backward", "layout": {"pp": 2, "dp_replicate": 2}},
        {"rank": 3, "span": "forward"},
        {"rank": 2, "span": "both", "layout": {"dp_replicate": 2, "dp_shard": 2}},
        {"rank": 0, "span": "both", "layout": {"tp": 4}},
        {"link": 1},
        {},
    ],
)
def test_who_is_slowed_is_named_and_nobody_else(pool: Pool, case: dict[str, Any]) -> None:
    found = ran(pool, {"seed": 7, "since": 5, "steps": STEPS, "sleeps": True, "times": 4.0, **case})
    assert found["right"] == bool(case)
    assert found["wrong"] == []
