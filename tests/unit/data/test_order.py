"""Every epoch is a permutation, a pure function of seed and position."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data.sample_dataset_interface import ShuffledOrder, mix, permute, permute_twin
from lmtrain.errors import DataError

SEEDS = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("function", [permute, permute_twin])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 64, 255, 256, 257, 1000, 65536, 65537])
def test_an_epoch_has_every_id_once(function: object, n: int) -> None:
    assert callable(function)
    for seed in (0, 1, 2**64 - 1):
        found = function(np.arange(n), n, seed)
        assert np.array_equal(np.sort(found), np.arange(n))
        assert np.array_equal(found, permute_twin(np.arange(n), n, seed))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 2**62), seed=SEEDS, data=st.data())
def test_large_permutations_are_one_to_one(n: int, seed: int, data: st.DataObject) -> None:
    ids = np.array(data.draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1, max_size=40)))
    places = permute(ids, n, seed)
    assert len(set(places.tolist())) == len(ids)
    assert places.min() >= 0
    assert places.max() < n
    assert np.array_equal(places, permute_twin(ids, n, seed))


def test_all_permutations_occur_evenly() -> None:
    counts = Counter(tuple(permute(np.arange(4), 4, mix(seed)).tolist()) for seed in range(12_000))
    assert len(counts) == 24
    assert max(abs(count - 500) for count in counts.values()) < 5 * 500**0.5


def test_neighbours_are_scattered() -> None:
    n = 100_000
    places = permute(np.arange(n), n, 7)
    assert abs(np.corrcoef(places, np.arange(n))[0, 1]) < 0.02
    assert abs(np.corrcoef(places[1:], places[:-1])[0, 1]) < 0.02
    buckets = np.bincount(places[:10_000] // 1000, minlength=100)
    assert abs(buckets - 100).max() < 60


def test_the_order_never_changes() -> None:
    """A checkpoint of today must read the same samples in a year."""
    assert ShuffledOrder(10, 1234).ids(0, 20).tolist() == GOLDEN
    assert permute(np.arange(4), 10**12, 5).tolist() == GOLDEN_LARGE


GOLDEN = [4, 2, 7, 8, 6, 9, 3, 5, 1, 0, 5, 4, 8, 0, 9, 7, 3, 1, 2, 6]
GOLDEN_LARGE = [470668764812, 772138780055, 713000191630, 931684718904]


def test_ids_outside_are_refused() -> None:
    for ids in ([-1], [5]):
        with pytest.raises(ValueError, match=r"from 0 to 4"):
            permute(np.array(ids), 5, 0)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 30), seed=SEEDS, first=st.integers(0, 100), count=st.integers(0, 20))
def test_ids_are_a_function_of_position(n: int, seed: int, first: int, count: int) -> None:
    order = ShuffledOrder(n, seed)
    one_by_one = [int(order.ids(k, 1)[0]) for k in range(first, first + count)]
    assert order.ids(first, count).tolist() == one_by_one


def test_epochs_are_complete_and_differ() -> None:
    order = ShuffledOrder(50, 3)
    epochs = [order.ids(50 * e, 50).tolist() for e in range(5)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert ShuffledOrder(50, 4).ids(0, 50).tolist() not in epochs


def test_a_dataset_without_samples_is_an_error() -> None:
    with pytest.raises(DataError, match="gives no sample"):
        ShuffledOrder(0, 1)
