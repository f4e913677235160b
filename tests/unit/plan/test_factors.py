"""The published runs that factors were fitted to are complete, and their numbers are plausible."""

from __future__ import annotations

import pytest

from lmtrain.plan.cost_model.hardware_figures import (
    MEMORY_FACTORS,
    TIME_FACTORS,
    Factor,
    fitted_interval,
    fitted_memory_factors,
    fitted_time_factors,
)
from tests.unit.plan.machines import range_problems


@pytest.mark.parametrize("factors", [TIME_FACTORS, MEMORY_FACTORS])
def test_what_was_thought_beforehand_is_within_its_range(factors: dict[str, Factor]) -> None:
    assert list(range_problems({name: factor.value for name, factor in factors.items()}, factors)) == []


def test_fitted_values_are_within_their_ranges() -> None:
    assert list(range_problems(fitted_time_factors().values)) == []
    assert list(range_problems(fitted_memory_factors().values, MEMORY_FACTORS)) == []


def test_a_value_beyond_its_range_or_without_a_name_is_told() -> None:
    odd = dict(fitted_time_factors().values) | {"gap_s": 1.0, "luck": 0.5}
    del odd["link_share"]
    assert list(range_problems(odd)) == [
        "link_share is missing",
        "luck is no factor",
        "gap_s=1 is outside 3e-07 to 5e-06",
    ]


def test_the_interval_is_narrower_than_a_fifth() -> None:
    assert 0.02 < fitted_interval() < 0.2
