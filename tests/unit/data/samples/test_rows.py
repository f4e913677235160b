"""Rows to batches: the compiled helpers equal their twins and refuse to read or write outside the arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data.samples.causal_language_samples import (
    document_positions,
    document_positions_twin,
    expand_runs,
    read_rows,
    read_rows_twin,
    read_runs,
    read_runs_twin,
)
from lmtrain.data.samples.packing import copy_rows, copy_rows_twin
from lmtrain.runtime import compiled_helpers


@given(runs=st.lists(st.tuples(st.integers(-5, 9), st.integers(0, 4)), max_size=8))
def test_ragged_runs(runs: list[tuple[int, int]]) -> None:
    which, numbers = expand_runs(np.array([f for f, _ in runs], np.int64), np.array([n for _, n in runs], np.int64))
    assert which.tolist() == [r for r, (_, count) in enumerate(runs) for _ in range(count)]
    assert numbers.tolist() == [first + i for first, count in runs for i in range(count)]


@given(num=st.integers(1, 4), seq_len=st.integers(1, 9), data=st.data())
def test_separating_documents(num: int, seq_len: int, data: st.DataObject) -> None:
    begins = sorted(data.draw(st.sets(st.tuples(st.integers(0, num - 1), st.integers(1, seq_len)))))
    rows, places = (np.array([one[i] for one in begins], np.int64) for i in (0, 1))
    positions, documents = document_positions(num, seq_len, rows, places)
    for row in range(num):
        mine = [0, *(place for r, place in begins if r == row and place < seq_len)]
        assert positions[row].tolist() == [i - max(p for p in mine if p <= i) for i in range(seq_len)]
        assert documents[row].tolist() == [sum(p <= i for p in mine) - 1 for i in range(seq_len)]
    firsts = sorted({r * seq_len + p for r, p in begins if p < seq_len} | {r * seq_len for r in range(num)})
    twin = document_positions_twin(np.array(firsts), num, seq_len)
    assert [array.tolist() for array in twin] == [positions.tolist(), documents.tolist()]
    assert [array.dtype.str for array in (*twin, positions, documents)] == ["<i8", "<i4"] * 2


DTYPES = [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64]


@settings(max_examples=30)
@given(
    dtype=st.sampled_from(DTYPES), sizes=st.lists(st.integers(0, 5), max_size=6), limit=st.integers(1, 40),
    data=st.data(),
)  # fmt: skip
def test_copying_pieces(dtype: type[np.integer], sizes: list[int], limit: int, data: st.DataObject) -> None:
    low = -1 if data.draw(st.booleans()) and dtype not in (np.uint8, np.uint16) else 0
    tokens = np.array(data.draw(st.lists(st.integers(low, 40), min_size=7, max_size=30)), dtype)
    starts = np.array([data.draw(st.integers(0, len(tokens) - 1 - size)) for size in sizes], np.int64)
    gaps = data.draw(st.lists(st.integers(0, 1), min_size=len(sizes), max_size=len(sizes)))
    targets = np.cumsum([0, *sizes])[:-1].astype(np.int64) + np.cumsum(gaps, dtype=np.int64)
    used: list[int] = []
    expected = np.array([[0], [-100]]).repeat(40, axis=1)
    for start, size, target in zip(starts, sizes, targets, strict=True):
        expected[:, target : target + size] = tokens[start : start + size], tokens[start + 1 : start + size + 1]
        used += tokens[start : start + size + 1].tolist() if size else []
    for function in (copy_rows, copy_rows_twin):
        ids, labels, known = function(tokens, starts, np.array(sizes, np.int64), targets, 4, 10, limit)
        assert [ids.tolist(), labels.tolist()] == expected.reshape(2, 4, 10).tolist()
        assert ids.dtype == labels.dtype == np.int64
        assert known == all(0 <= token < limit for token in used)


@settings(max_examples=30)
@given(dtype=st.sampled_from(DTYPES), seq_len=st.integers(1, 6), limit=st.integers(1, 40), data=st.data())
def test_reading_rows(dtype: type[np.integer], seq_len: int, limit: int, data: st.DataObject) -> None:
    low = -1 if data.draw(st.booleans()) and dtype not in (np.uint8, np.uint16) else 0
    tokens = np.array(data.draw(st.lists(st.integers(low, 40), min_size=7, max_size=30)), dtype)
    samples = data.draw(st.lists(st.integers(0, (len(tokens) - 1) // seq_len - 1), max_size=5))
    rows = [tokens[i * seq_len : (i + 1) * seq_len + 1].tolist() for i in samples]
    for function in (read_rows, read_rows_twin):
        ids, labels, known = function(tokens, np.array(samples, np.int64), seq_len, limit)
        assert (ids.tolist(), labels.tolist()) == ([row[:-1] for row in rows], [row[1:] for row in rows])
        assert ids.dtype == labels.dtype == np.int64
        assert ids.shape == (len(rows), seq_len)
        assert known == all(0 <= token < limit for row in rows for token in row)


@pytest.mark.parametrize("sample", [-1, 3, 2**62])
@pytest.mark.parametrize("function", [read_rows, read_rows_twin])
def test_samples_outside_the_tokens_are_refused(function: Callable[..., object], sample: int) -> None:
    with pytest.raises(IndexError, match="outside"):
        function(np.arange(12, dtype=np.uint16), np.array([0, sample]), 3, 100)  # the third has its last label


@settings(max_examples=30)
@given(dtype=st.sampled_from(DTYPES), seq_len=st.integers(1, 6), limit=st.integers(1, 40), data=st.data())
def test_reading_runs(dtype: type[np.integer], seq_len: int, limit: int, data: st.DataObject) -> None:
    low = -1 if data.draw(st.booleans()) and dtype not in (np.uint8, np.uint16) else 0
    tokens = np.array(data.draw(st.lists(st.integers(low, 40), min_size=7, max_size=30)), dtype)
    num = data.draw(st.integers(0, 4))
    cuts = sorted(data.draw(st.lists(st.integers(0, num * (seq_len + 1)), max_size=9)))
    sizes = np.diff([0, *cuts, num * (seq_len + 1)])
    sizes = np.array([part for size in sizes for part in [7] * (size // 7) + [size % 7]], np.int64)
    starts = np.array([data.draw(st.integers(0, len(tokens) - size)) for size in sizes.tolist()], np.int64)
    ends = zip(starts, starts + sizes, strict=True)
    all_rows = np.concatenate([tokens[start:end] for start, end in ends]).reshape(num, seq_len + 1)
    for function in (read_runs, read_runs_twin):
        ids, labels, known = function(tokens, starts, sizes, num, seq_len, limit)
        assert (ids.tolist(), labels.tolist()) == (all_rows[:, :-1].tolist(), all_rows[:, 1:].tolist())
        assert ids.dtype == labels.dtype == np.int64
        assert ids.shape == labels.shape == (num, seq_len)
        assert known == all(0 <= token < limit for token in all_rows.ravel().tolist())


@pytest.mark.parametrize("wrong", [-1, 100])
@pytest.mark.parametrize("place", [0, 2, 3])
def test_an_id_outside_the_vocabulary_is_noticed_at_any_place(place: int, wrong: int) -> None:
    """Also as the first token of a row, which is no label, and as the last, which is nothing else."""
    tokens = np.zeros(4, np.int32)
    tokens[place] = wrong
    first, size = np.array([0]), np.array([4])
    for *_, known in (
        read_rows(tokens, first, 3, 100), read_rows_twin(tokens, first, 3, 100),
        read_runs(tokens, first, size, 1, 3, 100), read_runs_twin(tokens, first, size, 1, 3, 100),
    ):  # fmt: skip
        assert not known


@pytest.mark.parametrize("function", [read_runs, read_runs_twin])
@pytest.mark.parametrize(
    ("start", "size", "num"),
    [(-1, 4, 1), (9, 4, 1), (0, -4, -1), (0, 4, 2), (0, 8, 1), (0, 3, 1), (2**62, 4, 1), (0, 2**62, 1), (12, 1, 0)],
)
def test_runs_outside_the_tokens_are_refused(function: Callable[..., object], start: int, size: int, num: int) -> None:
    with pytest.raises(ValueError, match=r"outside|fill|size"):
        function(np.arange(12, dtype=np.uint16), np.array([start]), np.array([size]), num, 3, 100)


@pytest.mark.parametrize(
    ("start", "size", "target"),
    [(-1, 2, 0), (8, 2, 0), (9, 1, 0), (0, -1, 0), (0, 5, 6), (0, 2, -1), (2**62, 1, 0), (0, 1, 2**62), (0, 2**62, 0)],
)
def test_pieces_outside_the_arrays_are_refused(start: int, size: int, target: int) -> None:
    if compiled_helpers.lib is None:
        pytest.skip("lmtrain._native was not compiled")
    arrays = [np.array([value], np.int64) for value in (start, size, target)]
    with pytest.raises(ValueError, match="outside"):
        compiled_helpers.lib.pack_rows(np.arange(10, dtype=np.uint16), *arrays, 2, 5, 100)


def test_pieces_do_not_overlap() -> None:
    if compiled_helpers.lib is None:
        pytest.skip("lmtrain._native was not compiled")
    arrays = [np.array(values, np.int64) for values in ([0, 0], [2, 2], [1, 2])]
    with pytest.raises(ValueError, match="outside"):
        compiled_helpers.lib.pack_rows(np.arange(10, dtype=np.uint16), *arrays, 2, 5, 100)


@pytest.mark.parametrize(("firsts", "num"), [([], 1), ([1], 1), ([0, 0], 1), ([0, 4], 1), ([0, 3, 2], 1), ([0], -1)])
def test_places_outside_the_rows_are_refused(firsts: list[int], num: int) -> None:
    if compiled_helpers.lib is None:
        pytest.skip("lmtrain._native was not compiled")
    with pytest.raises(ValueError, match=r"rise|beginning|size"):
        compiled_helpers.lib.separate(np.array(firsts, np.int64), num, 4)
