"""Documents are found as a walk over all of them finds them, with any memory; damage is found."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmtrain.data.store import document_boundaries
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.document_boundaries import (
    DocumentMap,
    are_contiguous,
    are_contiguous_twin,
    classify_bounds,
    classify_bounds_twin,
    split_documents,
    split_tokens,
)
from lmtrain.data.store.index_cache import IndexCache
from lmtrain.data.store.indexed_dataset import IndexedDataset, dataset_file
from lmtrain.errors import DataError
from lmtrain.runtime import compiled_helpers
from tests.unit.data.writing import add_document, map_of


def slow_find(lengths: list[int], token: int) -> int:
    """Document by document."""
    for document, length in enumerate(lengths):
        if token < length:
            return document
        token -= length
    raise AssertionError("beyond the end")


def check(found: DocumentMap, lengths: list[int]) -> None:
    starts = [0, *accumulate(lengths)]
    assert found.num_documents == len(lengths)
    assert found.starts(np.arange(len(lengths) + 1)).tolist() == starts
    tokens = np.arange(starts[-1])
    assert found.find(tokens).tolist() == [slow_find(lengths, token) for token in range(starts[-1])]
    assert found.lengths(0, len(lengths)).tolist() == lengths


@given(lengths=st.lists(st.integers(0, 9), max_size=30))
def test_a_map_from_sizes_finds_every_document(lengths: list[int]) -> None:
    check(map_of(np.array(lengths, np.int32)), lengths)


@pytest.mark.parametrize("stride", [1, 2, 7, 1000])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_dataset_map_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stride: int, pieces: int) -> None:
    chance = np.random.default_rng(stride + pieces)
    lengths = [*np.where(chance.random(200) < 0.2, 0, chance.integers(0, 9, 200)).tolist(), 0, 0]
    with DatasetWriter(tmp_path / "a", np.uint16) as writer:
        for length in lengths:
            add_document(writer, np.array_split(np.ones(length, np.uint16), pieces))
    monkeypatch.setattr(document_boundaries, "STRIDE", stride)
    monkeypatch.setattr(document_boundaries, "ALL_IN_MEMORY", 0 if stride > 1 else 1000)
    monkeypatch.setattr(document_boundaries, "_CHUNK", 64)
    check(DocumentMap.of(IndexedDataset.open(tmp_path / "a")), lengths)


def test_documents_that_are_sequences_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 9, 100).tolist()
    with DatasetWriter(tmp_path / "a", np.uint16) as writer:
        for length in lengths:
            add_document(writer, [np.ones(length, np.uint16)])
    monkeypatch.setattr(document_boundaries, "STRIDE", 8)
    monkeypatch.setattr(document_boundaries, "ALL_IN_MEMORY", 0)
    found = DocumentMap.of(IndexedDataset.open(tmp_path / "a"))
    assert found._is_one_sequence_each
    check(found, lengths)


def test_a_checked_index_is_not_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_boundaries, "_CACHED_FROM", 0)
    lengths = [3, 0, 5, 2]
    with DatasetWriter(tmp_path / "a", np.uint16) as writer:
        for length in lengths:
            add_document(writer, [np.ones(length, np.uint16)])
    cache = IndexCache(tmp_path / "cache")
    check(DocumentMap.of(IndexedDataset.open(tmp_path / "a"), cache), lengths)
    [folder] = (tmp_path / "cache").glob("documents-*")
    before = (folder / "every").stat().st_mtime_ns
    check(DocumentMap.of(IndexedDataset.open(tmp_path / "a"), cache), lengths)
    assert (folder / "every").stat().st_mtime_ns == before
    assert [path.name for path in (tmp_path / "cache").glob("documents-*")] == [folder.name]


def test_another_dataset_of_the_same_size_is_another_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_boundaries, "_CACHED_FROM", 0)
    cache = IndexCache(tmp_path / "cache")
    for lengths in ([3, 5, 2], [2, 5, 3]):
        with DatasetWriter(tmp_path / "a", np.uint16, overwrite=True) as writer:
            for length in lengths:
                add_document(writer, [np.ones(length, np.uint16)])
        check(DocumentMap.of(IndexedDataset.open(tmp_path / "a"), cache), lengths)
    assert len(list((tmp_path / "cache").glob("documents-*"))) == 2


@pytest.mark.parametrize(("offset", "value"), [(34, -1), (34, 4), (58, 5), (90, 3), (98, 9), (106, -1)])
def test_damage_is_found_while_indexing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, value: int
) -> None:
    monkeypatch.setattr(document_boundaries, "_CHUNK", 2)  # so that most of what is looked at in portions is whole
    with DatasetWriter(tmp_path / "a", np.uint16) as writer:
        for _ in range(4):
            add_document(writer, [np.ones(3, np.uint16)])
    path = dataset_file(tmp_path / "a", ".idx")
    raw = bytearray(path.read_bytes())
    raw[offset : offset + 4] = value.to_bytes(4, "little", signed=True)
    path.write_bytes(raw)
    dataset = IndexedDataset.open(tmp_path / "a")
    with pytest.raises(DataError, match="offset"):
        DocumentMap.of(dataset)


NUMBERS = st.one_of(st.integers(-3, 9), st.integers(-(2**63), 2**63 - 1))


@given(values=st.lists(NUMBERS, min_size=1, max_size=8), step=st.booleans())
def test_rising_bounds(values: list[int], step: bool) -> None:
    if step:
        values = list(range(values[0] % 100, values[0] % 100 + len(values)))
    bounds = unaligned(np.array(values, np.int64))
    expected = 0 if any(b < a for a, b in pairwise(values)) else 1
    if expected and all(b == a + 1 for a, b in pairwise(values)):
        expected = 2
    assert classify_bounds_twin(bounds) == expected
    assert classify_bounds(bounds) == expected


@given(
    lengths=st.lists(st.integers(-2, 9), max_size=8), itemsize=st.sampled_from([1, 2, 4, 8]),
    at=st.integers(0, 8), wrong=st.sampled_from([0, 0, 1, -1, 2**40, -(2**62)]),
)  # fmt: skip
def test_contiguous_sequences_are_recognized(lengths: list[int], itemsize: int, at: int, wrong: int) -> None:
    pointers = [0, *accumulate(length * itemsize for length in lengths)]
    pointers[min(at, len(lengths))] += wrong
    expected = all(n >= 0 and b - a == n * itemsize for n, (a, b) in zip(lengths, pairwise(pointers), strict=True))
    arrays = unaligned(np.array(lengths, np.int32)), unaligned(np.array(pointers, np.int64))
    assert are_contiguous_twin(*arrays, itemsize) == expected
    assert are_contiguous(*arrays, itemsize) == expected


def unaligned(array: NDArray[Any]) -> NDArray[Any]:
    """As the arrays of an .idx are."""
    raw = np.zeros(array.nbytes + 2, np.uint8)
    raw[2:] = array.view(np.uint8)
    return np.frombuffer(raw, array.dtype, len(array), 2)


@pytest.mark.parametrize("follow", [are_contiguous, are_contiguous_twin])
@pytest.mark.parametrize("tokens", [2**30, 2**31 - 1])
def test_a_sequence_may_be_larger_than_four_gibibytes(follow: Callable[..., bool], tokens: int) -> None:
    lengths = np.array([tokens, 3, tokens], np.int32)
    pointers = np.array([0, 4 * tokens, 4 * tokens + 12, 8 * tokens + 12])
    assert follow(lengths, pointers, 4)
    pointers[2] += 4
    assert not follow(lengths, pointers, 4)


@pytest.mark.skipif(compiled_helpers.lib is None, reason="lmtrain._native was not compiled")
def test_the_compiled_check_refuses_arrays_that_do_not_belong_together() -> None:
    assert compiled_helpers.lib is not None
    with pytest.raises(ValueError, match="sizes differ"):
        compiled_helpers.lib.sequences_follow(np.zeros(8, np.uint8), np.zeros(16, np.uint8), 2)


@settings(max_examples=40)
@given(num=st.integers(0, 10_000), ratios=st.lists(st.floats(0, 1000), min_size=1, max_size=3))
def test_splits_are_a_partition(num: int, ratios: list[float]) -> None:
    if sum(ratios) == 0:
        return
    ranges = split_documents(num, ratios)
    assert [i for one in ranges for i in one] == list(range(num))
    for one, ratio in zip(ranges, [*ratios, 0.0, 0.0], strict=False):
        assert abs(len(one) - num * ratio / sum(ratios)) <= 1


@settings(max_examples=40)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.floats(0.001, 0.999), st.integers(0, 1))
def test_a_split_by_tokens_is_at_the_nearest_border(lengths: list[int], share: float, least: int) -> None:
    map_ = map_of(np.array(lengths))
    train, valid = split_tokens(map_, share, least)
    assert [*train, *valid] == [*range(len(lengths))]
    assert train
    assert len(valid) >= min(least, len(lengths) - 1)
    target, starts = round(sum(lengths) * (1 - share)), [map_.start(at) for at in range(1, len(lengths) + 1 - least)]
    if starts:
        assert abs(map_.start(len(train)) - target) == min(abs(start - target) for start in starts)


@pytest.mark.parametrize("ratios", [(0.98, 0.02, 0.0), (98, 2), (49, 1, 0)])
def test_splits_have_no_scale(ratios: tuple[float, ...]) -> None:
    assert split_documents(100, ratios) == (range(98), range(98, 100), range(100, 100))
