"""Clocks that are seconds apart and drift are found from bounds and from common ends, also among outliers."""

from __future__ import annotations

import numpy as np
import pytest

from lmtrain.observe.timeline.clock_offsets import Clocks, Pairs, fit_clocks

NONE = Pairs(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), np.zeros(0))


def clocks(num: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    offsets, drifts = rng.uniform(-2e9, 2e9, num), rng.uniform(-2e-4, 2e-4, num)
    offsets[0] = drifts[0] = 0.0
    return offsets, drifts


def errors(found: Clocks, offsets: np.ndarray, drifts: np.ndarray) -> np.ndarray:
    """At moments through the window of ten seconds, in ns."""
    true = np.linspace(0, 10e9, 9)
    shown = true[None] * (1 + drifts[:, None]) + offsets[:, None]
    return np.stack([found.correct(rank, one) - true for rank, one in enumerate(shown)])


def test_messages_both_ways_along_a_chain() -> None:
    """Each direction is tight only now and then; the other messages lie in the mailbox for milliseconds."""
    rng = np.random.default_rng(3)
    offsets, drifts = clocks(6, rng)
    a = rng.integers(0, 5, 600)
    up = rng.random(600) < 0.5
    a, b = np.where(up, a, a + 1), np.where(up, a + 1, a)
    sent = rng.uniform(0, 10e9, 600)
    came = sent + 60e3 + np.where(rng.random(600) < 0.2, rng.exponential(10e3, 600), rng.exponential(5e6, 600))
    pairs = Pairs(a, sent * (1 + drifts[a]) + offsets[a], b, came * (1 + drifts[b]) + offsets[b])
    found = fit_clocks(6, pairs, NONE)
    assert np.abs(errors(found, offsets, drifts)).max() < 100e3
    assert found.linked.all()
    assert np.abs(found.rate + drifts).max() < 2e-5


def test_ends_of_collectives_of_which_some_are_late() -> None:
    rng = np.random.default_rng(4)
    offsets, drifts = clocks(8, rng)
    times = np.sort(rng.uniform(0, 10e9, 200))
    ends = times[None] + rng.exponential(30e3, (8, 200)) + (rng.random((8, 200)) < 0.1) * 8e6
    shown = ends * (1 + drifts[:, None]) + offsets[:, None]
    a = np.concatenate([np.full(200, rank) for rank in range(7)])
    pairs = Pairs(a, shown[:-1].ravel(), a + 1, shown[1:].ravel())
    assert np.abs(errors(fit_clocks(8, NONE, pairs), offsets, drifts)).max() < 100e3


def test_a_rank_that_nothing_joins_keeps_the_first_guess() -> None:
    ranks = np.array([0, 0])
    pairs = Pairs(ranks, np.array([0.0, 1e9]), ranks + 1, np.array([5e6, 1e9 + 5e6]))
    found = fit_clocks(3, NONE, pairs)
    assert found.linked.tolist() == [True, True, False]
    assert (found.offset_ns[2], found.rate[2]) == (0.0, 0.0)
    assert found.correct(1, np.array([5e6, 1e9 + 5e6])) == pytest.approx([0.0, 1e9], abs=1e3)


def test_without_any_evidence_nothing_is_moved() -> None:
    found = fit_clocks(2, NONE, NONE)
    assert (found.offset_ns == 0).all()
    assert found.linked.tolist() == [True, False]
