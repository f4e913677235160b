"""The facts about a dataset, its documents and its samples, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.errors import UsageError, way

if TYPE_CHECKING:
    from lmtrain.data.store.indexed_dataset import IndexedDataset
    from lmtrain.data.training_data_by_source import TrainingData
    from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

_MAX_LENGTHS_READ = 1 << 24  # the lengths of so many sequences are read in a fraction of a second


def dataset_facts(path: Path, verify: bool = False) -> dict[str, Any]:
    """Return a dict of JSON values about a dataset: numbers of documents and tokens, dtype, bytes, shortest and longest
    sequence in tokens, and the contents of its sidecar (.json). With `verify`, first read and check the whole dataset;
    raise an error if it is damaged.
    """
    from lmtrain.data.store import merge_split_verify_datasets
    from lmtrain.data.store.indexed_dataset import dataset_file
    from lmtrain.data.store.joined_dataset import open_dataset

    dataset = open_dataset(path)
    if verify:
        merge_split_verify_datasets.verify(dataset)
    reads_lengths = verify or dataset.num_sequences <= _MAX_LENGTHS_READ
    lengths = dataset.lengths if reads_lengths and dataset.num_sequences else None
    return {
        "dataset": str(dataset.prefix),
        "verified": verify,
        "documents": dataset.num_documents,
        "sequences": dataset.num_sequences,
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "bytes": sum(
            dataset_file(shard.prefix, suffix).stat().st_size for shard in dataset.shards for suffix in (".bin", ".idx")
        ),
        "shortest_sequence": None if lengths is None else int(lengths.min()),
        "longest_sequence": None if lengths is None else int(lengths.max()),
        "sidecar": asdict(dataset.info) if dataset.info else None,
    }


def document_rows(
    dataset: IndexedDataset, documents: Sequence[int], max_tokens: int | None, tokenizer: Tokenizer | None
) -> Iterator[dict[str, Any]]:
    """Yield a dict for each document number (from 0): its number, its whole token count, and its first `max_tokens`
    tokens (None: all) as text, or as ids if `tokenizer` is None. Raise UsageError if there is no such document.
    """
    dataset.check_index()
    for number in documents:
        if not 0 <= number < dataset.num_documents:
            raise UsageError(
                f"Document {number} is not in {dataset.prefix}. Give a number from 0 to {dataset.num_documents - 1}."
            )
        start, stop = dataset.document_range(number)
        ids = dataset.read(start, stop if max_tokens is None else min(start + max_tokens, stop)).tolist()
        content = {"ids": ids} if tokenizer is None else {"text": tokenizer.decode(ids)}
        yield {"document": number, "tokens": stop - start} | content


def check_sample_number(data: TrainingData, number: int) -> None:
    """Raise UsageError if there is no training sample `number`, from 0."""
    from lmtrain.data.samples.masked_language_samples import MaskedDataset

    num_samples = data.train.num_samples
    if number >= num_samples and not isinstance(data.train, MaskedDataset):  # its numbers continue through the epochs
        last = way(str(num_samples - 1), instead_of=str(number))  # because: the option's other values stay
        raise UsageError(f"--sample={number} is not one of the {num_samples} training samples. Use {last} or less.")


def sample_row(data: TrainingData, number: int, max_tokens: int | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a dict that shows training sample `number` (from 0) as the model reads it: its text, token ids and labels,
    cut to the first `max_tokens` tokens (None: all), and the documents that it comes from.
    """
    import numpy as np

    from lmtrain.data.samples.causal_language_samples import CausalDataset
    from lmtrain.data.samples.masked_language_samples import MaskedDataset

    part = 0
    batch, index_in_part = data.train.batch(np.array([number])), number
    while part < len(data.parts) - 1 and index_in_part >= data.parts[part].dataset.num_samples:
        index_in_part, part = index_in_part - data.parts[part].dataset.num_samples, part + 1
    dataset = data.parts[part].dataset
    row: dict[str, Any] = {
        "sample": number, "dataset": str(data.parts[part].indexed.prefix), "tokens": len(batch.tokens_BT[0]),
        "num_labels": int((batch.labels_BT >= 0).sum()),
    }  # fmt: skip
    ids, labels = batch.tokens_BT[0][:max_tokens].tolist(), batch.labels_BT[0][:max_tokens].tolist()
    if isinstance(dataset, CausalDataset):
        row["documents"] = [
            {"document": document, "from": first, "to": last}
            for document, first, last in dataset.index.document_spans(index_in_part)
        ]
    # an ignored label is below 0
    row |= {"text": tokenizer.decode(ids), "ids": ids, "labels": [label if label >= 0 else None for label in labels]}
    if isinstance(data.train, MaskedDataset):
        row["predicted"] = {str(i): tokenizer.piece(label) for i, label in enumerate(labels) if label >= 0}
    if batch.pair_labels_B is not None:
        row["pair_label"] = int(batch.pair_labels_B[0])
    return row
