"""Who is slow is named, whatever it is slow in; chance names nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lmtrain.observe.stragglers.find_slow_ranks import (
    MIN_EXCESS,
    MIN_EXCESS_S,
    WINDOWS_IN_A_ROW,
    PeerGroup,
    medians_of_others,
)

KINDS = ("data", "forward", "backward")


def ranks(count: int) -> PeerGroup:
    return PeerGroup(range(10, 10 + count), KINDS, MIN_EXCESS, MIN_EXCESS_S)


def window(generator: np.random.Generator, count: int, noise: float) -> Any:
    """100 ms of work a step."""
    return np.tile([0.001, 0.033, 0.066], (count, 1)) * (1 + noise * generator.standard_normal((count, 1)))


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_who_is_a_tenth_slower_is_named_with_its_work(count: int, kind: int) -> None:
    generator, watched = np.random.default_rng(count), ranks(count)
    for number in range(10 + WINDOWS_IN_A_ROW):
        times = window(generator, count, 0.005)
        times[1, kind] += 0.010 if number >= 10 else 0.0
        assert not watched.stragglers
        watched.add(times.tolist())
    assert [*watched.stragglers] == [11]
    slow = watched.stragglers[11]
    assert slow.kind == KINDS[kind]
    assert slow.by == pytest.approx(0.1, abs=0.02)
    assert slow.seconds - slow.usual_s == pytest.approx(0.010, abs=0.002)
    assert slow.num_peers == count - 1


def test_who_keeps_pace_again_is_named_no_more() -> None:
    generator, watched = np.random.default_rng(1), ranks(4)
    for number in range(40):
        times = window(generator, 4, 0.005)
        times[2, 1] *= 1.5 if number < 20 else 1.0
        watched.add(times.tolist())
        assert (12 in watched.stragglers) == (3 <= number < 20 + WINDOWS_IN_A_ROW - 1)


@pytest.mark.parametrize(
    ("noise", "seeds"),
    [
        (0.03, 2),
        (0.5, 1),
        *(pytest.param(noise, 40, marks=pytest.mark.wide) for noise in (0.001, 0.01, 0.03, 0.1, 0.5)),
    ],
)
def test_chance_names_nobody(noise: float, seeds: int) -> None:
    for seed in range(seeds):
        generator, watched = np.random.default_rng(seed), ranks(4)
        for _ in range(250):
            watched.add(np.abs(window(generator, 4, noise)).tolist())
            assert not watched.stragglers


def test_in_much_noise_it_takes_longer() -> None:
    generator, watched, named = np.random.default_rng(3), ranks(4), 0
    while not watched.stragglers:
        times = window(generator, 4, 0.05)
        times[3] *= 1.1
        watched.add(times.tolist())
        named += 1
    assert [*watched.stragglers] == [13]
    assert WINDOWS_IN_A_ROW < named <= 16 * 16


def test_a_slow_step_now_and_then_is_no_slow_rank() -> None:
    watched, generator = ranks(4), np.random.default_rng(5)
    for number in range(100):
        times = window(generator, 4, 0.002)
        times[0] *= 3.0 if number % 5 == 0 else 1.0
        watched.add(times.tolist())
        assert not watched.stragglers


def test_microseconds_are_not_worth_a_word() -> None:
    watched = ranks(2)
    for _ in range(20):
        watched.add([[0, 0.001, 0.001], [0, 0.001, 0.0015]])
    assert not watched.stragglers


def test_who_tells_nothing_is_not_judged_and_others_are() -> None:
    watched = ranks(4)
    for _ in range(WINDOWS_IN_A_ROW):
        watched.add([[np.nan] * 3, [0.1] * 3, [0.1] * 3, [0.2] * 3])
    assert [*watched.stragglers] == [13]


def test_one_alone_is_compared_with_nobody() -> None:
    watched = ranks(1)
    watched.add([[1.0] * 3])
    assert not watched.stragglers
    assert watched.excess() == [0.0]


@pytest.mark.parametrize("count", range(2, 9))
def test_the_median_of_the_others(count: int) -> None:
    values = np.random.default_rng(count).integers(0, 5, count).astype(float)
    values[0] = np.nan
    expected = [np.median([v for j, v in enumerate(values) if j not in (0, i)] or [np.nan]) for i in range(count)]
    assert medians_of_others(values.tolist())[1:] == pytest.approx(expected[1:], nan_ok=True)
    assert np.isnan(medians_of_others(values.tolist())[0])
