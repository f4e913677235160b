"""The counts of a blend are exact at every position, and any position can be computed alone."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data.samples import blend
from lmtrain.data.samples.blend import MAX_SHARE_SUM, Schedule, advance, advance_twin, integer_shares
from lmtrain.runtime import compiled_helpers

SHARES = st.one_of(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.lists(st.integers(1, 10**9), min_size=1, max_size=8),
    st.lists(st.integers(0, 30).map(lambda bit: 1 << bit), min_size=1, max_size=12),
    st.integers(1, 40).map(lambda num: [7] * num),
)


@settings(max_examples=50, deadline=None)
@given(shares=SHARES, length=st.integers(1, 400))
def test_no_count_is_ever_off_by_one(shares: list[int], length: int) -> None:
    total = sum(shares)
    datasets, samples = Schedule(shares).assign(0, length)
    counts = [0] * len(shares)
    for position, (dataset, sample) in enumerate(zip(datasets.tolist(), samples.tolist(), strict=True), 1):
        assert sample == counts[dataset]
        counts[dataset] += 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count * total - position * share) < total


@settings(max_examples=80, deadline=None)
@given(shares=SHARES, data=st.data())
def test_the_compiled_answer_and_its_twin(shares: list[int], data: st.DataObject) -> None:
    array, total = np.array(shares, np.int64), sum(shares)
    start = data.draw(st.integers(0, min(total, 300)))
    count = data.draw(st.integers(0, min(total - start, 300)))
    counts = advance_twin(array, np.zeros_like(array), 0, start, with_positions=False)[2]
    ours, theirs = (function(array, counts, start, count, with_positions=True) for function in (advance, advance_twin))
    assert [array.tolist() for array in ours] == [array.tolist() for array in theirs]
    assert [array.dtype for array in ours] == [array.dtype for array in theirs]


def test_late_in_a_long_run_of_fine_shares_the_twins_still_agree() -> None:
    shares, start = np.array([2**38, 2**38, 2**39], np.int64), 2**34  # whose products do not fit 64 bits
    counts = np.array([start // 4, start // 4, start // 2], np.int64)
    ours, theirs = (function(shares, counts, start, 40, with_positions=True) for function in (advance, advance_twin))
    assert [array.tolist() for array in ours] == [array.tolist() for array in theirs]


@settings(max_examples=40, deadline=None)
@given(shares=SHARES, first=st.integers(0, 3000), count=st.integers(0, 300), block=st.sampled_from([16, 64, 1000]))
def test_any_position_alone(shares: list[int], first: int, count: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        whole = [array.tolist() for array in Schedule(shares).assign(0, first + count)]
        patch.setattr(blend, "BLOCK", block)
        part = [array.tolist() for array in Schedule(shares).assign(first, count)]
        assert part == [array[first:] for array in whole]
        counts = Schedule(shares).samples_before(first)
    assert counts == [whole[0][:first].count(d) for d in range(len(shares))]


def test_a_thousand_datasets_far_out() -> None:
    shares = integer_shares([int(share) for share in np.random.default_rng(0).lognormal(20, 1.5, 1000)])
    schedule, position = Schedule(shares), 1_234_567
    total = sum(shares)
    for count, share in zip(schedule.samples_before(position), shares, strict=True):
        assert abs(count * total - position * share) < total
    datasets, samples = schedule.assign(position, 1000)
    before = np.array(schedule.samples_before(position))
    for dataset, sample in zip(datasets.tolist(), samples.tolist(), strict=True):
        assert sample == before[dataset]
        before[dataset] += 1


def test_epochs_of_the_schedule_go_on() -> None:
    schedule = Schedule([3, 2])
    assert schedule.samples_before(5 * 10**15) == [3 * 10**15, 2 * 10**15]
    datasets, samples = schedule.assign(5 * 10**15, 5)
    assert sorted(zip(datasets.tolist(), samples.tolist(), strict=True)) == [
        (0, 3 * 10**15), (0, 3 * 10**15 + 1), (0, 3 * 10**15 + 2), (1, 2 * 10**15), (1, 2 * 10**15 + 1)
    ]  # fmt: skip


def test_the_schedule_never_changes() -> None:
    """A checkpoint of today must read the same samples in a year."""
    assert Schedule([5, 3, 2]).assign(0, 12)[0].tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1]


def test_whole_shares_are_exact() -> None:
    assert integer_shares([0.5, 0.3, 0.2]) == [5, 3, 2]
    assert integer_shares([2.0, 1.0, 0.1]) == [20, 10, 1]
    assert integer_shares([Fraction(1, 3), Fraction(1, 6)]) == [2, 1]
    assert integer_shares([300 * 10**9, 100 * 10**9]) == [3, 1]


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_whole_shares_are_near(weights: list[float]) -> None:
    shares, total = integer_shares(weights), sum(map(Fraction, weights))
    assert sum(shares) <= MAX_SHARE_SUM + len(shares)
    assert min(shares) >= 1
    for share, weight in zip(shares, weights, strict=True):
        assert abs(Fraction(share, sum(shares)) - Fraction(weight) / total) < Fraction(40, MAX_SHARE_SUM)


@pytest.mark.parametrize(
    ("shares", "counts", "start", "count"),
    [([], [], 0, 0), ([0], [0], 0, 0), ([3], [1], 0, 1), ([3], [0], 0, 4), ([3, 2], [0], 0, 1), ([3], [-1], -1, 1),
     ([1 << 62, 1 << 62], [0, 0], 0, 1), ([1000, 1], [0, 1], 1, 1 << 62), ([6, 6], [6, 0], 6, 6)],
)  # fmt: skip
def test_the_compiled_run_refuses_what_cannot_be(shares: list[int], counts: list[int], start: int, count: int) -> None:
    if compiled_helpers.lib is None:
        pytest.skip("lmtrain._native was not compiled")
    with pytest.raises(ValueError, match=r"differ|wrong|large|position|behind"):
        compiled_helpers.lib.blend(np.array(shares, np.int64), np.array(counts, np.int64), start, count, True)
