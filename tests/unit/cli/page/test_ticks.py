"""Round numbers on an axis: within it, few, evenly spaced, and written so that no two look the same."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lmtrain.cli.page.svg_line_charts import format_value, log_ticks, tick_labels, ticks

RANGES = [(0, 1), (-3, 7), (1.999, 2.001), (0, 3.1e12), (5, 4e5), (0, 1e-7), (9, 1e7)]


@pytest.mark.parametrize("form", ["number", "count", "bytes", "seconds", "percent"])
@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-3, 7), (1.999, 2.001), (0, 3.1e12), (5, 4e5), (0, 1e-7), (100, 1e7)]
)
def test_ticks_lie_in_the_axis_and_can_be_told_apart(low: float, high: float, form: str) -> None:
    found = ticks(low, high, 8, form)  # type: ignore[arg-type]
    assert 2 <= len(found) <= 10
    assert low - 1e-9 * abs(low) <= found[0] < found[-1] <= high * (1 + 1e-9)
    assert np.allclose(np.diff(found), found[1] - found[0])
    if form in ("number", "count"):
        assert len(set(tick_labels(found, form))) == len(found)  # type: ignore[arg-type]


def test_an_axis_of_one_point() -> None:
    assert ticks(3.0, 3.0, 5) == [3.0]


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [(1, 1000, [1, 10, 100, 1000]), (1, 30, [1, 2, 5, 10, 20]), (0.5, 1.1, [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1])],
)
def test_powers_of_ten(low: float, high: float, want: list[float]) -> None:
    assert log_ticks(low, high, 8) == pytest.approx(want)


@pytest.mark.parametrize("most", [4, 5, 6, 8])
def test_a_logarithmic_axis_has_several_numbers(most: int) -> None:
    for low in np.geomspace(0.2, 20, 41).tolist():
        for factor in (3, 3.2, 4.4, 9, 40, 1e3, 1e9):
            assert 2 <= len(log_ticks(low, low * factor, most)) <= 2 * most, (low, factor)


@pytest.mark.parametrize(
    ("value", "form", "want"),
    [
        (0.0, "number", "0"), (2.5, "number", "2.5"), (3e-4, "number", "3.0e-04"), (0.431, "percent", "43.1%"),
        (1.5e9, "count", "1.5B"), (2**30, "bytes", "1 GiB"), (0.0125, "seconds", "12.5 ms"), (3725, "seconds", "1h02m"),
        (math.nan, "seconds", "-"), (math.nan, "number", "-"),
    ],
)  # fmt: skip
def test_how_numbers_are_written(value: float, form: str, want: str) -> None:
    assert format_value(value, form) == want  # type: ignore[arg-type]
