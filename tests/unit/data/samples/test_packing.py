"""Packed rows hold whole documents, waste little, and have every label of the data exactly once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.batch import IGNORED
from lmtrain.data.samples import packing
from lmtrain.data.samples.packing import (
    PackedDataset,
    Packing,
    best_fit,
    best_fit_twin,
    copy_rows,
    copy_rows_twin,
)
from lmtrain.data.store.index_cache import IndexCache
from lmtrain.errors import DataError
from lmtrain.runtime import compiled_helpers
from tests.unit.data.conftest import Make
from tests.unit.data.writing import map_of

LENGTHS = st.lists(st.integers(0, 25), min_size=1, max_size=30)
KINDS = ["document", "best_fit"]


def packed(lengths: list[int], seq_len: int, kind: str) -> Packing:
    return Packing.of(map_of(np.array(lengths)), range(len(lengths)), seq_len, kind)


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=LENGTHS, seq_len=st.integers(1, 12), window=st.sampled_from([1, 4, 1000]))
def test_every_label_once_and_no_cut_that_need_not_be(kind: str, lengths: list[int], seq_len: int, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW", window)
        made = packed(lengths, seq_len, kind)
    labels: list[int] = []
    ends = np.cumsum([0, *lengths]).tolist()
    for row in range(made.num_rows):
        stretches = range(made.bounds[row], made.bounds[row + 1])
        sizes = [int(made.sizes[p]) for p in stretches]
        assert min(sizes) >= 1
        assert made.filled[row] == sum(sizes) <= seq_len
        assert kind == "best_fit" or len(sizes) == 1
        for p in stretches:
            start, size = int(made.starts[p]), int(made.sizes[p])
            document = max(d for d in range(len(lengths)) if ends[d] <= start)
            assert start + size < ends[document + 1]  # the last label is of the same document
            if lengths[document] - 1 <= seq_len:
                assert (start, size) == (ends[document], lengths[document] - 1)
            labels += range(start + 1, start + size + 1)
    everything = [ends[d] + i for d, length in enumerate(lengths) for i in range(1, length)]
    assert sorted(labels) == everything


@given(sizes=st.lists(st.integers(1, 200), max_size=60), capacity=st.integers(1, 200))
def test_the_compiled_fit_and_its_twin(sizes: list[int], capacity: int) -> None:
    array = np.minimum(np.array(sizes, np.int32), capacity).astype(np.int32)
    expected = slow_fit(array.tolist(), capacity)
    assert best_fit(array, capacity).tolist() == best_fit_twin(array, capacity).tolist() == expected


def slow_fit(sizes: list[int], capacity: int) -> list[int]:
    """The rule word by word: look at every row."""
    rooms: list[int] = []
    changed: list[int] = []
    result = [0] * len(sizes)
    for turn, i in enumerate(sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))):
        fitting = [row for row in range(len(rooms)) if rooms[row] >= sizes[i]]
        if fitting:
            row = min(fitting, key=lambda row: (rooms[row], -changed[row]))
        else:
            row = len(rooms)
            rooms.append(capacity)
            changed.append(turn)
        rooms[row] -= sizes[i]
        changed[row] = turn
        result[i] = row
    return result


@pytest.mark.parametrize("seq_len", [1024, 2048, 8192])
def test_best_fit_wastes_little(seq_len: int) -> None:
    lengths = np.maximum(np.random.default_rng(0).lognormal(6.3, 1.1, 100_000).astype(int), 1).tolist()
    made = packed(lengths, seq_len, "best_fit")
    wasted = 1 - int(made.filled.sum()) / (made.num_rows * seq_len)
    assert wasted < 0.01


def slow_batch(data: PackedDataset, tokens: list[int], row: int) -> tuple[list[int], ...]:
    """Piece by stretch, then padding."""
    packing, seq_len = data.packing, data.seq_len
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    documents: list[int] = []
    number = 0
    for p in range(packing.bounds[row], packing.bounds[row + 1]):
        start, size = int(packing.starts[p]), int(packing.sizes[p])
        ids += tokens[start : start + size]
        labels += tokens[start + 1 : start + size + 1]
        positions += range(size)
        documents += [number] * size
        number += 1
    padding = seq_len - len(ids)
    return (
        ids + [0] * padding, labels + [IGNORED] * padding,
        positions + list(range(padding)), documents + [number] * padding,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [True, False])
def test_batches_equal_the_slow_twin(make: Make, kind: str, mask: bool) -> None:
    indexed = make("a", [3, 0, 9, 1, 2, 30, 5, 7, 2, 2, 11, 4], base=100)
    data = PackedDataset(indexed, range(1, 12), 8, kind, mask)
    tokens = indexed.tokens.tolist()
    ids = np.random.default_rng(0).permutation(data.num_samples)
    batch = data.batch(ids)
    for i, row in enumerate(ids.tolist()):
        expected = slow_batch(data, tokens, row)
        assert batch.tokens_BT[i].tolist() == expected[0]
        assert batch.labels_BT[i].tolist() == expected[1]
        if mask:
            assert batch.positions_BT[i].tolist() == expected[2]
            assert batch.documents_BT[i].tolist() == expected[3]
        assert data.counts(ids[i : i + 1]) == (int((batch.labels_BT[i] != IGNORED).sum()),) * 2
    assert (batch.positions_BT is not None) == mask
    assert data.counts(ids) == (int((batch.labels_BT != IGNORED).sum()),) * 2


def test_ids_outside_the_vocabulary_are_refused(make: Make) -> None:
    indexed = make("a", [5, 5], base=95)
    with pytest.raises(DataError, match="holds the id 104; the vocabulary has the ids 0 to 103"):
        PackedDataset(indexed, range(2), 8, "best_fit", True, vocab_size=104).batch(np.array([0]))


def test_documents_without_a_label_are_no_data(make: Make) -> None:
    with pytest.raises(DataError, match="0 samples"):
        PackedDataset(make("a", [1, 0, 1]), range(3), 8, "document", False)


def test_a_large_packing_is_cached(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_CACHED_FROM", 0)
    datasets = make("a", [5, 9, 2, 2, 7]), make("b", [9, 5, 2, 2, 7])
    ranges = range(5), range(4), range(1, 5)
    for indexed, documents, seq_len, kind in [*product(datasets, ranges, (8, 4), ("best_fit", "document"))] * 2:
        kept = PackedDataset(indexed, documents, seq_len, kind, True, cache=IndexCache(tmp_path / "cache"))
        fresh = PackedDataset(indexed, documents, seq_len, kind, True)
        for name in ("starts", "sizes", "bounds", "filled"):
            assert getattr(kept.packing, name).tolist() == getattr(fresh.packing, name).tolist()
    assert len(list((tmp_path / "cache").glob("best_fit-*"))) == 12


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(-2, 12), min_size=1, max_size=5), capacity=st.integers(-1, 9))
def test_the_compiled_fit_refuses_what_cannot_be(sizes: list[int], capacity: int) -> None:
    if compiled_helpers.lib is None or (capacity >= 1 and all(1 <= size <= capacity for size in sizes)):
        return
    with pytest.raises(ValueError, match="must lie in"):
        compiled_helpers.lib.best_fit(np.array(sizes, np.int32), capacity)


@pytest.mark.parametrize("copy", [copy_rows, copy_rows_twin])
@pytest.mark.parametrize("tokens", [[4, 1, 2, 0], [1, 4, 2, 0], [1, 2, 0, 4], [1, -1, 2, 0]])
def test_ids_are_valid_up_to_the_last_of_the_vocabulary(copy: Callable[..., Any], tokens: list[int]) -> None:
    one = np.array([0]), np.array([3]), np.array([0])
    for vocab_size in (4, 5):
        *_, ids_valid = copy(np.array(tokens, np.int32), *one, 1, 3, vocab_size)
        assert ids_valid == (vocab_size == 5 and -1 not in tokens)
