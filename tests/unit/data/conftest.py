"""Datasets of a few documents for the tests of samples, blends and packing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset
from tests.unit.data.writing import add_document

Make = Callable[..., IndexedDataset]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make("name", lengths) -> a dataset of documents of these lengths; token t of the dataset is `base + t`."""

    def build(name: str, lengths: list[int], base: int = 0, described: bool = False) -> IndexedDataset:
        ends = np.cumsum([0, *lengths]) + base
        with DatasetWriter(tmp_path / name, np.int32, overwrite=True) as writer:
            for i in range(len(lengths)):
                add_document(writer, [np.arange(ends[i], ends[i + 1])])
            if described:
                writer.describe(tokenizer=b"{}", fingerprint="abc", vocab_size=10**6, eod_id=None, num_bytes=42)
        return IndexedDataset.open(tmp_path / name)

    return build
