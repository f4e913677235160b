"""Batches hold the right tokens and labels; with a document mask nothing reaches across documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lmtrain.batch import IGNORED
from lmtrain.data.samples.causal_language_samples import CausalDataset
from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.errors import DataError
from tests.unit.data.writing import add_document

DOCUMENTS = [[10, 11, 12], [], [20, 21, 22, 23, 24], [30], [40, 41, 42]]
FLAT = [token for document in DOCUMENTS for token in document]


@pytest.fixture
def indexed(tmp_path: Path) -> IndexedDataset:
    with DatasetWriter(tmp_path / "a", np.uint16) as writer:
        for document in DOCUMENTS:
            add_document(writer, [np.array(document)])
    return IndexedDataset.open(tmp_path / "a")


def test_tokens_and_labels(indexed: IndexedDataset) -> None:
    dataset = CausalDataset(indexed, range(5), 4)
    assert dataset.num_samples == 2
    batch = dataset.batch(np.array([1, 0]))
    assert batch.tokens_BT.tolist() == [FLAT[4:8], FLAT[0:4]]
    assert batch.labels_BT.tolist() == [FLAT[5:9], FLAT[1:5]]
    assert (batch.tokens_BT.dtype, batch.labels_BT.dtype) == (np.int64, np.int64)
    assert batch.positions_BT is None
    assert batch.documents_BT is None
    assert dataset.counts(np.array([0, 1, 1])) == (12, 12)


def test_the_document_mask(indexed: IndexedDataset) -> None:
    dataset = CausalDataset(indexed, range(5), 10, document_mask=True)
    batch = dataset.batch(np.array([0]))
    assert batch.tokens_BT.tolist() == [FLAT[:10]]
    assert batch.labels_BT.tolist() == [[11, 12, IGNORED, 21, 22, 23, 24, IGNORED, IGNORED, 41]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 0]]
    assert batch.documents_BT.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 2, 3]]
    assert (batch.documents_BT.dtype, batch.positions_BT.dtype) == (np.int32, np.int64)
    assert dataset.counts(np.array([0])) == (7, 10)


def test_a_row_that_begins_within_a_document(indexed: IndexedDataset) -> None:
    dataset = CausalDataset(indexed, range(1, 5), 4, document_mask=True)
    batch = dataset.batch(np.array([1]))
    assert batch.tokens_BT.tolist() == [[24, 30, 40, 41]]
    assert batch.labels_BT.tolist() == [[IGNORED, IGNORED, 41, 42]]
    assert batch.positions_BT.tolist() == [[0, 0, 0, 1]]
    assert batch.documents_BT.tolist() == [[0, 1, 2, 2]]


def test_labels_are_counted_as_they_are_made(indexed: IndexedDataset) -> None:
    for seq_len in range(1, 11):
        dataset = CausalDataset(indexed, range(5), seq_len, document_mask=True)
        for sample in range(dataset.num_samples):
            ids = np.array([sample])
            assert dataset.counts(ids) == (int((dataset.batch(ids).labels_BT != IGNORED).sum()), seq_len)


def test_too_little_data(indexed: IndexedDataset) -> None:
    with pytest.raises(DataError, match=r"data\.split gives 0 samples of 1024 tokens: its 2 of the 5 .* hold 4 tokens"):
        CausalDataset(indexed, range(3, 5), 1024)
    with pytest.raises(DataError, match="0 samples"):
        CausalDataset(indexed, range(5, 5), 4)


def test_ids_outside_the_vocabulary_are_refused(indexed: IndexedDataset) -> None:
    with pytest.raises(DataError, match="holds the id 30; the vocabulary has the ids 0 to 22"):
        CausalDataset(indexed, range(5), 4, vocab_size=23).batch(np.array([0, 1]))
    with DatasetWriter(indexed.prefix.with_name("b"), np.int32) as writer:
        add_document(writer, [np.arange(9)])
    bin_path = indexed.prefix.with_name("b.bin")
    bin_path.write_bytes(b"\xff" * 4 + bin_path.read_bytes()[4:])
    with pytest.raises(DataError, match="holds the id -1; the vocabulary has the ids 0 to"):
        CausalDataset(IndexedDataset.open(bin_path), range(1), 4).batch(np.array([0]))
