"""Few points for many: every part keeps its lowest and its highest value at their places."""

from __future__ import annotations

import numpy as np
import pytest

from lmtrain.observe.history.read_metrics_columns import extreme_indices, part_boundaries, part_means


@pytest.mark.parametrize(("count", "most"), [(0, 10), (7, 10), (10, 10), (11, 10), (1000, 10), (99_991, 300)])
def test_extremes_stay_where_they_were(count: int, most: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    kept = extreme_indices(values, most)
    assert len(kept) <= max(most, count if count <= most else 0)
    assert (np.diff(kept) > 0).all()
    if count:
        assert {0, count - 1, int(values.argmin()), int(values.argmax())} <= set(kept.tolist())
    for begin, end in zip(borders := part_boundaries(count, max(most // 2 - 1, 1)), borders[1:], strict=False):
        if end > begin and count > most:
            inside = values[kept[(kept >= begin) & (kept < end)]]
            assert (inside.min(), inside.max()) == (values[begin:end].min(), values[begin:end].max())


def test_means_are_of_all_values() -> None:
    values = np.arange(1001.0)
    ends, averages = part_means(values, 10)
    sizes = np.diff(np.append(-1, ends))
    assert (ends[-1], sizes.sum()) == (1000, 1001)
    assert (averages * sizes).sum() == pytest.approx(values.sum())
    assert part_means(np.empty(0), 10)[0].size == 0
