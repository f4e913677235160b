"""A blend reads each dataset in that dataset's own order, independent of steps and ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data.sample_dataset_interface import ShuffledOrder
from lmtrain.data.samples.blend import BlendedDataset, BlendOrder, FileOrder, blend_seeds, rows_by_dataset
from lmtrain.data.samples.causal_language_samples import CausalDataset
from lmtrain.data.samples.megatron_sample_order import MegatronBlendOrder, blend_index
from lmtrain.errors import DataError
from tests.unit.data.conftest import Make


def build(make: Make, mask: bool) -> BlendedDataset:
    lengths = [[9, 4, 30], [50], [7] * 12]
    return BlendedDataset(
        [CausalDataset(make(f"d{i}", one, base=1000 * i), range(len(one)), 5, mask) for i, one in enumerate(lengths)]
    )


def shuffled(shares: list[int], sizes: list[int], seed: int) -> BlendOrder:
    return BlendOrder(shares, sizes, list(map(ShuffledOrder, sizes, blend_seeds(seed, len(sizes)))))


@pytest.mark.parametrize("mask", [False, True])
def test_rows_are_those_of_the_datasets(make: Make, mask: bool) -> None:
    blended = build(make, mask)
    alone = [[dataset.batch(np.array([i])) for i in range(dataset.num_samples)] for dataset in blended.datasets]
    flat = [batch for batches in alone for batch in batches]
    assert blended.num_samples == len(flat)
    ids = np.random.default_rng(0).permutation(len(flat))
    batch = blended.batch(ids)
    for row, sample in enumerate(ids.tolist()):
        for name in ("tokens_BT", "labels_BT", *(["positions_BT", "documents_BT"] if mask else [])):
            assert getattr(batch, name)[row].tolist() == getattr(flat[sample], name)[0].tolist()
    assert (batch.positions_BT is None) == (not mask)
    each = [blended.counts(np.array([sample])) for sample in ids]
    assert blended.counts(ids) == (sum(one.labels for one in each), sum(one.tokens for one in each))
    two = blended.batch(np.array([0, 1])).tokens_BT  # of one dataset
    assert two.tolist() == [flat[i].tokens_BT[0].tolist() for i in (0, 1)]


@settings(max_examples=20, deadline=None)
@given(
    shares=st.lists(st.integers(1, 20), min_size=1, max_size=5), seed=st.integers(0, 99), first=st.integers(0, 500),
    count=st.integers(0, 60), data=st.data(),
)  # fmt: skip
def test_ids_are_a_function_of_position(
    shares: list[int], seed: int, first: int, count: int, data: st.DataObject
) -> None:
    sizes = [data.draw(st.integers(1, 30)) for _ in shares]
    order = shuffled(shares, sizes, seed)
    whole = order.ids(0, first + count)
    assert order.ids(first, count).tolist() == whole[first:].tolist()
    which = np.searchsorted(np.cumsum(sizes), whole, side="right")
    for d, size in enumerate(sizes):
        taken = (whole[which == d] - order.offsets[d]).tolist()
        for epoch in range(len(taken) // size):  # each epoch of each dataset is complete
            assert sorted(taken[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert order.samples_before(len(whole)) == [int((which == d).sum()) for d in range(len(sizes))]


def test_seeds_and_datasets_differ() -> None:
    shares, sizes = [1, 1], [1000, 1000]
    one, other = shuffled(shares, sizes, 1).ids(0, 200), shuffled(shares, sizes, 2).ids(0, 200)
    assert one.tolist() != other.tolist()
    assert (one[one < 1000]).tolist() != (one[one >= 1000] - 1000).tolist()
    plain = BlendOrder(shares, [3, 2], [FileOrder(3), FileOrder(2)]).ids(0, 8)
    assert plain.tolist() == [0, 3, 1, 4, 2, 3, 0, 4]


def test_megatrons_blend() -> None:
    order = MegatronBlendOrder([0.5, 0.3, 0.2], [6, 4, 3], 10)
    datasets, samples = blend_index([0.5, 0.3, 0.2], 10)
    assert order.ids(0, 10).tolist() == (np.array([0, 6, 10])[datasets] + samples).tolist()
    assert order.ids(4, 3).tolist() == order.ids(0, 10)[4:7].tolist()
    assert order.samples_before(7) == np.bincount(datasets[:7], minlength=3).tolist()
    with pytest.raises(DataError, match=r"Sample 11 .* ends after 10"):
        order.ids(8, 3)
    with pytest.raises(DataError, match="takes 5 samples of dataset 1, which has only 4"):
        MegatronBlendOrder([0.5, 0.3, 0.2], [4, 4, 3], 10)


def test_rows_are_grouped_by_dataset() -> None:
    groups = [(d, rows.tolist()) for d, rows in rows_by_dataset(np.array([2, 0, 2, 1]))]
    assert groups == [(0, [1]), (1, [3]), (2, [0, 2])]
    assert list(rows_by_dataset(np.empty(0, np.int64))) == []
