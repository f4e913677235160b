"""Intervals against what is known of them: the normal theory of a mean, pairs, units, and what has no interval."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lmtrain.eval import statistics
from lmtrain.eval.statistics import intervals, middle_interval, resampled_sums
from lmtrain.eval.task import ratio


def mean(sums: dict[str, float] | object) -> dict[str, float]:
    assert isinstance(sums, dict)
    return {"mean": ratio(sums["nll"], sums["items"])}


def columns(num_items: int) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    return {"nll": np.random.default_rng(3).normal(5.0, 2.0, num_items), "items": np.ones(num_items)}


@pytest.mark.parametrize("most_units", [10_000, 500])
def test_the_interval_of_a_mean_is_what_theory_says(most_units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "MAX_UNITS", most_units)
    drawn = columns(2000)
    low, high = intervals(drawn, mean)["mean"]
    error = drawn["nll"].std() / math.sqrt(2000)
    assert (low, high) == pytest.approx((drawn["nll"].mean() - 1.96 * error, drawn["nll"].mean() + 1.96 * error), 1e-2)
    assert high - low == pytest.approx(3.92 * error, rel=0.12)


def test_it_repeats_itself_and_draws_the_same_items_whatever_the_columns_say() -> None:
    ours, other = columns(40), columns(40) | {"more": np.arange(40.0)}
    assert intervals(ours, mean) == intervals(ours, mean)
    first, second = list(resampled_sums(ours, 70)), list(resampled_sums(other, 70))
    assert [sums["nll"] for sums in first] == pytest.approx([sums["nll"] for sums in second])
    assert {sums["items"] for sums in first} == {40.0}
    assert len(first) == 70


def test_no_resample_is_drawn_twice() -> None:
    drawn = [round(sums["nll"], 6) for sums in resampled_sums(columns(40))]
    assert len(drawn) == len(set(drawn)) == statistics.RESAMPLES


def test_sums_of_a_resample_are_exact() -> None:
    """Whole numbers whose sums fp32 could not hold: a column that follows from the others still does so."""
    values = np.random.default_rng(4).integers(0, 1 << 30, 50_000).astype(np.float64)
    table = {"nll": values, "items": np.ones(50_000), "other": 3 * values + 1}
    for sums in resampled_sums(table, 20):
        assert sums["other"] == 3 * sums["nll"] + sums["items"]


def test_one_item_has_no_interval_and_neither_has_what_is_not_a_number() -> None:
    assert intervals(columns(1), mean) == {}
    assert middle_interval([1.0, math.nan, 2.0]) is None
    assert middle_interval([1.0] * 10 + [math.inf] * 90) == (1.0, math.inf)
