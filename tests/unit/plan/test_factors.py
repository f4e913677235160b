"""The numbers that published runs were fitted with: all there, each within what is plausible."""

from __future__ import annotations

import pytest

from lmtrain.plan.price.hardware import FACTORS, MEMORY_FACTORS, Factor, fitted, fitted_memory, interval
from tests.unit.plan.machines import range_problems


@pytest.mark.parametrize("factors", [FACTORS, MEMORY_FACTORS])
def test_what_was_thought_beforehand_is_within_its_range(factors: dict[str, Factor]) -> None:
    assert list(range_problems({name: factor.value for name, factor in factors.items()}, factors)) == []


def test_fitted_values_are_within_their_ranges() -> None:
    assert list(range_problems(fitted().values)) == []
    assert list(range_problems(fitted_memory().values, MEMORY_FACTORS)) == []


def test_a_value_beyond_its_range_or_without_a_name_is_told() -> None:
    odd = dict(fitted().values) | {"gap_s": 1.0, "luck": 0.5}
    del odd["link_share"]
    assert list(range_problems(odd)) == [
        "link_share is missing",
        "luck is no factor",
        "gap_s=1 is outside 3e-07 to 5e-06",
    ]


def test_the_interval_is_narrower_than_a_fifth() -> None:
    assert 0.02 < interval() < 0.2
