"""Buckets that are the same for every tensor, so that counts can be added."""

from __future__ import annotations

import pytest

from lmtrain.runfolder.tensorboard_metric_names import EDGES, Histogram


def test_edges_rise_and_are_as_far_below_0_as_above() -> None:
    assert list(EDGES) == sorted(set(EDGES))
    assert [-edge for edge in reversed(EDGES)] == list(EDGES)
    assert 2.0 in EDGES


def test_buckets_begin_at_the_first_that_holds_something_and_end_at_the_last() -> None:
    counts = [0] * (len(EDGES) + 1)
    counts[0], counts[2] = 3, 1
    found = Histogram(-1e9, EDGES[1], 0.0, 0.0, counts)
    assert found.count == 4
    assert found.buckets() == [
        (-1e9, EDGES[0], 3), (EDGES[0], EDGES[1], 0), (EDGES[1], pytest.approx(EDGES[2]), 1),
    ]  # fmt: skip
