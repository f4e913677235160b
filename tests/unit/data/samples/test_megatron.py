"""Megatron-LM's order number for number: known vectors, and a twin that follows its rules word by word."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmtrain.batch import IGNORED
from lmtrain.data.samples import megatron_sample_order as megatron_order
from lmtrain.data.samples.megatron_sample_order import (
    Epochs,
    MegatronDataset,
    SequentialOrder,
    blend_index,
    blend_index_twin,
    blend_sizes,
    build_index,
    split_sequences,
)
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.index_cache import IndexBuild, IndexCache
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.errors import DataError
from lmtrain.runtime import compiled_helpers
from tests.unit.data.conftest import Make
from tests.unit.data.writing import add_document, read_sequence

Rows = list[tuple[int, int]]


def slow_sample_index(lengths: list[int], documents: list[int], seq_len: int, num_samples: int) -> Rows:
    """Walk from document to document, as a sample takes seq_len + 1 tokens and gives the last one back."""
    rows, place, offset = [(0, 0)], 0, 0
    for _ in range(num_samples):
        remaining = seq_len + 1
        while True:
            available = lengths[documents[place]] - offset
            remaining -= available
            if remaining <= 0:
                offset += remaining + available - 1
                break
            place, offset = place + 1, 0
        rows.append((place, offset))
    return rows


def slow_indexes(
    lengths: list[int], first: int, stop: int, seq_len: int, wanted: int, seed: int
) -> tuple[list[int], Rows, list[int]]:
    """Epochs until there are enough tokens; the last apart if little of it is used."""
    tokens, num_epochs = sum(lengths[first:stop]), 1
    while num_epochs * tokens < wanted * seq_len + 1:
        num_epochs += 1
    total = (num_epochs * tokens - 1) // seq_len
    before = ((num_epochs - 1) * tokens - 1) // seq_len
    apart = num_epochs > 1 and wanted - before < int(0.8 * ((tokens - 1) // seq_len))
    chance, once = np.random.RandomState(seed), np.arange(first, stop, dtype=np.int32)
    parts = [np.tile(once, num_epochs - 1), once.copy()] if apart else [np.tile(once, num_epochs)]
    for part in parts:
        chance.shuffle(part)
    documents = np.concatenate(parts).tolist()
    numbers = np.arange(total, dtype=np.uint32)
    samples = [numbers[:before], numbers[before:]] if apart else [numbers]
    for some in samples:
        chance.shuffle(some)
    return documents, slow_sample_index(lengths, documents, seq_len, total), np.concatenate(samples).tolist()


def built(lengths: Sequence[int], sequences: range, seq_len: int, wanted: int, seed: int) -> dict[str, NDArray[Any]]:
    build = IndexBuild(None)
    epochs = Epochs.of(sum(lengths[sequences.start : sequences.stop]), wanted, seq_len)
    build_index(build, np.array(lengths, np.int32), sequences, epochs, wanted, seed)
    return build.arrays


def test_known_vectors() -> None:
    chance = np.random.RandomState(1234)
    documents, samples = np.arange(5, dtype=np.int32), np.arange(6, dtype=np.uint32)
    chance.shuffle(documents)
    chance.shuffle(samples)
    assert documents.tolist() == [4, 0, 1, 2, 3]
    assert samples.tolist() == [5, 2, 3, 1, 0, 4]
    made = built([5, 3, 8, 2, 7], range(5), 4, 6, 1234)
    assert made["document_index"].tolist() == [4, 0, 1, 2, 3]
    assert made["shuffle_index"].tolist() == [5, 2, 3, 1, 0, 4]
    names = ("document_index", "sample_index", "shuffle_index")
    assert [made[name].dtype.str for name in names] == ["<i4", "<i4", "<u4"]


def test_a_known_sample_index() -> None:
    rows = np.zeros((7, 2), np.int32)
    megatron_order._fill_sample_index(rows, np.array([3, 0, 4, 2, 1], np.int32), np.array([5, 3, 8, 2, 7]), 4)
    assert rows.tolist() == [[0, 0], [1, 2], [2, 1], [2, 5], [3, 2], [3, 6], [4, 2]]


@settings(max_examples=120, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=15), seq_len=st.integers(1, 9),
    wanted=st.integers(1, 80), seed=st.integers(0, 2**32 - 1), chunk=st.sampled_from([1, 3, 1000]), data=st.data(),
)  # fmt: skip
def test_equals_the_slow_twin(
    lengths: list[int], seq_len: int, wanted: int, seed: int, chunk: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(lengths) - 1))
    stop = data.draw(st.integers(first + 1, len(lengths)))
    if sum(lengths[first:stop]) == 0:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_order, "_CHUNK", chunk)
        made = built(lengths, range(first, stop), seq_len, wanted, seed)
    documents, rows, shuffled = slow_indexes(lengths, first, stop, seq_len, wanted, seed)
    assert made["document_index"].tolist() == documents
    assert list(map(tuple, made["sample_index"].reshape(-1, 2).tolist())) == rows
    assert made["shuffle_index"].tolist() == shuffled


def test_the_last_epoch_is_shuffled_apart_when_little_of_it_is_used() -> None:
    assert Epochs.of(tokens=1001, num_samples=10, seq_len=100) == Epochs(1, 1001, 100)
    apart = [Epochs.of(1001, n, 100).shuffles_last_apart(n) for n in (10, 11, 17, 18, 20)]
    assert apart == [False, True, True, False, False]


def test_splits_equal_megatrons() -> None:
    assert split_sequences(1000, (969, 30, 1)) == [range(969), range(969, 999), range(999, 1000)]
    assert split_sequences(7, (1,)) == [range(7), range(7, 7), range(7, 7)]
    assert split_sequences(5, (0.5, 0.5)) == [range(2), range(2, 5), range(5, 5)]  # Python rounds 2.5 to 2


def slow_sample(dataset: IndexedDataset, documents: list[int], rows: Rows, number: int) -> tuple[list[int], list[int]]:
    """Its tokens, and the places where a document begins."""
    (first, skipped), (last, kept) = rows[number], rows[number + 1]
    tokens: list[int] = []
    begins = []
    for place in range(first, last + 1):
        sequence = read_sequence(dataset, documents[place])
        part = sequence[skipped if place == first else 0 : kept + 1 if place == last else None]
        if part and tokens:
            begins.append(len(tokens))
        tokens += part
    return tokens, begins


@pytest.mark.parametrize("mask", [False, True])
def test_samples_come_in_its_order(make: Make, mask: bool) -> None:
    lengths = [5, 3, 8, 2, 7, 1, 1, 12, 4]
    indexed = make("a", lengths, base=1000)
    data = MegatronDataset(indexed, range(1, 9), 6, 20, 77, mask)
    documents, rows, shuffled = slow_indexes(lengths, 1, 9, 6, 20, 77)
    assert data.num_samples == len(shuffled) >= 20
    ids = np.arange(data.num_samples)
    batch = data.batch(ids)
    for k in ids.tolist():
        tokens, begins = slow_sample(indexed, documents, rows, shuffled[k])
        labels = [IGNORED if mask and i + 1 in begins else label for i, label in enumerate(tokens[1:])]
        assert batch.tokens_BT[k].tolist() == tokens[:-1]
        assert batch.labels_BT[k].tolist() == labels
        assert data.counts(ids[k : k + 1]) == (sum(label != IGNORED for label in labels), 6)
        if mask:
            firsts = [max([0, *(b for b in begins if b <= i)]) for i in range(6)]
            assert batch.positions_BT[k].tolist() == [i - first for i, first in enumerate(firsts)]
            assert batch.documents_BT[k].tolist() == [sum(b <= i for b in begins) for i in range(6)]


def test_one_epoch_and_none(make: Make) -> None:
    indexed = make("a", [5, 3, 8])
    assert MegatronDataset(indexed, range(3), 4, None, 1).num_samples == 3
    with pytest.raises(DataError, match="0 samples"):
        MegatronDataset(indexed, range(1, 2), 4, None, 1)
    with pytest.raises(DataError, match=r"Sample 4 was requested.* ends after 3"):
        SequentialOrder(3).ids(2, 2)
    assert SequentialOrder(3).ids(1, 2).tolist() == [1, 2]


def test_ids_outside_the_vocabulary_are_refused(make: Make) -> None:
    indexed = make("a", [5, 3, 8])
    with pytest.raises(DataError, match=r"a\.bin holds the id \d+; the vocabulary has the ids 0 to 4\."):
        MegatronDataset(indexed, range(3), 4, None, 1, vocab_size=5).batch(np.arange(3))


def test_large_indexes_are_kept(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_order, "_CACHED_FROM", 0)
    datasets, cache = (make("a", [5, 3, 8, 2]), make("b", [3, 5, 8, 2])), IndexCache(tmp_path / "cache")
    first: tuple[range, int, int, int] = (range(4), 4, 9, 1)
    others = [(range(3), 4, 9, 1), (range(1, 4), 4, 9, 1), (range(4), 3, 9, 1), (range(4), 4, 8, 1)]
    others += [(range(4), 4, 9, 2)]
    for indexed, inputs in product(datasets, [first, *others, first]):
        kept, fresh = MegatronDataset(indexed, *inputs, cache=cache), MegatronDataset(indexed, *inputs)
        for name in ("document_index", "sample_index", "shuffle_index"):
            assert getattr(kept, name).tolist() == getattr(fresh, name).tolist()
            assert getattr(kept, name).dtype == getattr(fresh, name).dtype
    assert len(list((tmp_path / "cache").glob("megatron-*"))) == 12


def test_documents_of_many_sequences_are_gone_through_by_sequence(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "a", np.uint16) as writer:
        add_document(writer, [np.arange(0, 5), np.arange(5, 8)])
        add_document(writer, [np.arange(8, 16)])
    data = MegatronDataset(IndexedDataset.open(tmp_path / "a"), range(3), 3, 5, 3)
    assert sorted(data.document_index.tolist()) == [0, 1, 2]
    assert data.batch(np.arange(5)).tokens_BT.shape == (5, 3)


def test_known_blends() -> None:
    datasets, samples = blend_index([0.5, 0.3, 0.2], 10)
    assert datasets.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]
    assert samples.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]
    assert [array.dtype.str for array in (datasets, samples)] == ["<i2", "<i8"]
    assert blend_index([2.5, 1.5, 1], 10)[0].tolist() == datasets.tolist()
    assert blend_sizes([1, 2], 1000) == ([334, 667], [336, 671])


@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), count=st.integers(0, 200))
def test_the_compiled_blend_and_its_twin(weights: list[float], count: int) -> None:
    array = np.array(weights)
    datasets, samples = blend_index_twin(array, count)
    if compiled_helpers.lib is not None:
        ours = compiled_helpers.lib.megatron_blend(array, count)
        assert [part.tolist() for part in ours] == [datasets.tolist(), samples.tolist()]
