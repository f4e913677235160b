"""Steps follow each other without gaps, whatever the ramp-up."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.data.batch_size_per_step import BatchPlan
from lmtrain.errors import SettingsError


@dataclass(frozen=True)
class Growth:
    start: int
    increment: int
    samples: int


@given(
    start=st.integers(1, 6), increment=st.integers(1, 5), times=st.integers(0, 6), samples=st.integers(1, 300)
)
def test_steps_follow_without_gaps(start: int, increment: int, times: int, samples: int) -> None:
    full = start + increment * times
    plan = BatchPlan(full, Growth(start, increment, samples))
    ranges = [plan.range_of(step) for step in range(400)]
    assert ranges[0][0] == 0
    assert all(first + count == after for (first, count), (after, _) in pairwise(ranges))
    for first, count in ranges:
        assert count == _slow_size(first, full, Growth(start, increment, samples), times)
    assert {count for _, count in ranges} <= set(plan.sizes_between(0))


def _slow_size(consumed: int, full: int, growth: Growth, times: int) -> int:
    """The batch grows by one increment each time another 1/times of the samples is consumed."""
    grown = sum(consumed >= growth.samples * i // times for i in range(1, times + 1)) if times else 0
    return min(growth.start + grown * growth.increment, full)


def test_a_constant_batch() -> None:
    plan = BatchPlan(8)
    assert (plan.range_of(0), plan.range_of(10**12), plan.sizes_between(0)) == ((0, 8), (8 * 10**12, 8), [8])


@pytest.mark.parametrize("growth", [Growth(3, 4, 10), Growth(12, 4, 10), Growth(0, 4, 10), Growth(4, 0, 10)])
def test_a_ramp_that_misses_the_batch(growth: Growth) -> None:
    with pytest.raises(SettingsError, match="never reaches the global batch of 8"):
        BatchPlan(8, growth)
