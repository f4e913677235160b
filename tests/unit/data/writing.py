"""Writing single documents with a DatasetWriter, and maps of documents that are not on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.data.store.dataset_writer import DatasetWriter
from lmtrain.data.store.document_boundaries import DocumentMap
from lmtrain.data.store.indexed_dataset import IndexedDataset


def add_document(writer: DatasetWriter, sequences: Sequence[NDArray[Any]]) -> None:
    """One document of some sequences (a text model's documents have one). An empty sequence does not count."""
    kept = [sequence for sequence in sequences if len(sequence)]
    tokens = np.concatenate(kept) if kept else np.empty(0, writer.dtype)
    writer.add_documents(tokens, np.array([len(s) for s in kept], np.int64), np.array([len(kept)]))


def read_sequence(dataset: IndexedDataset, i: int) -> list[int]:
    """The tokens of one sequence, checked as they are read."""
    start = int(dataset.pointers[i]) // dataset.dtype.itemsize
    return dataset.read(start, start + int(dataset.lengths[i])).tolist()  # type: ignore[no-any-return]


def map_of(lengths: Sequence[int] | NDArray[Any]) -> DocumentMap:
    """Documents of one sequence each, from their sizes alone."""
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    return DocumentMap(np.arange(len(starts)), starts[:-1], 1, int(starts[-1]), starts, 1)
