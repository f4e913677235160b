"""Sorting on disk: whatever the memory, the batches end to end are the sorted rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.corpus.flow.external_sort import Rows, Sorter, sort_rows


def sorted_by(folder: Path, chunks: list[Rows], columns: int, memory_bytes: int) -> Rows:
    with Sorter(columns, folder, memory_bytes) as sorter:
        for chunk in chunks:
            sorter.add(chunk)
        batches = list(sorter.batches())
    assert not list(folder.iterdir())
    return np.concatenate([*batches, np.empty((0, columns), np.uint64)])


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000), columns=st.integers(1, 3), sizes=st.lists(st.integers(0, 300), max_size=8),
    largest=st.sampled_from([2, 50, 2**64 - 1]), memory_bytes=st.integers(1, 20_000),
)  # fmt: skip
def test_the_order_equals_numpys(
    tmp_path_factory: pytest.TempPathFactory, seed: int, columns: int, sizes: list[int], largest: int, memory_bytes: int
) -> None:
    rng = np.random.default_rng(seed)
    chunks = [rng.integers(0, largest, (size, columns), dtype=np.uint64, endpoint=True) for size in sizes]
    found = sorted_by(tmp_path_factory.mktemp("sort"), chunks, columns, memory_bytes)
    expected = sort_rows(np.concatenate([*chunks, np.empty((0, columns), np.uint64)]))
    assert np.array_equal(found, expected)
    assert [tuple(row) for row in found] == sorted(tuple(row) for row in expected)


def test_no_batch_is_larger_than_the_memory_allows(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 10, (50_000, 2), dtype=np.uint64)
    with Sorter(2, tmp_path, 64_000) as sorter:
        sorter.add(rows)
        assert max(batch.nbytes for batch in sorter.batches()) <= 64_000


def test_rows_may_change_after_they_were_added(tmp_path: Path) -> None:
    rows = np.arange(10, dtype=np.uint64)[:, None]
    with Sorter(1, tmp_path) as sorter:
        sorter.add(rows)
        rows[:] = 0
        assert np.concatenate(list(sorter.batches())).ravel().tolist() == list(range(10))
