"""The facts about texts and datasets that tasks on any text report. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.data.store import joined_dataset
from lmtrain.data.store.document_boundaries import use_recorded_checksums
from lmtrain.data.store.indexed_dataset import IndexedDataset, dataset_file
from lmtrain.data.store.joined_dataset import dataset_exists
from lmtrain.errors import DataError
from lmtrain.eval.read_texts import TextInput, count_odd_characters
from lmtrain.eval.task import Columns, ratio
from lmtrain.eval.windows import Tokens
from lmtrain.runtime.files.atomic_files import refuse_sparse_file
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

_READ_TOKENS = 1 << 24  # tokens read at once
MAX_GROUPS = 100  # because: a folder with thousands of small files is one text to the user
# columns with a value per document, and facts of all documents, which are part of a task's Facts
ColumnsAndFacts = tuple[Columns, dict[str, Any]]


@dataclass(frozen=True)
class DatasetSequences:
    """Documents of a dataset, each after one end-of-document token, without the end-of-document token at its end."""

    indexed: IndexedDataset
    eod_id: int

    def __iter__(self) -> Iterator[Tokens]:
        for document in range(self.indexed.num_documents):
            tokens = self.indexed.document(document)
            if len(tokens) and tokens[-1] == self.eod_id:
                tokens = tokens[:-1]
            yield np.concatenate([np.array([self.eod_id], np.int64), tokens.astype(np.int64)])


def dataset_prefix(source: Path) -> Path | None:
    """Return PREFIX if `source` is PREFIX.bin, PREFIX.idx, or the PREFIX of an existing PREFIX.idx or of shards; None
    if it is no dataset.
    """
    if source.suffix in (".bin", ".idx"):
        return source.with_suffix("")
    return source if dataset_exists(source) else None


def open_dataset(prefix: Path, tokenizer: Tokenizer) -> IndexedDataset:
    """Open the dataset with the path prefix `prefix`, and read all its tokens to verify them. Raise DataError if it was
    made with another tokenizer than `tokenizer`.

    Another tokenizer is noticed as far as it is recorded with the dataset or shows in the token ids.
    """
    indexed = joined_dataset.open_dataset(prefix)
    if indexed.info is not None and indexed.info.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{prefix} was made with the tokenizer {indexed.info.tokenizer_fingerprint[:12]}, but the checkpoint has "
            f"{tokenizer.fingerprint[:12]}. Preprocess the text with the checkpoint's tokenizer."
        )
    use_recorded_checksums(indexed)
    for shard in indexed.shards:
        refuse_sparse_file(dataset_file(shard.prefix, ".bin"))
    total = indexed.num_tokens
    # read every token once, which also compares it with the checksums of its writing
    parts = (indexed.read(first, min(first + _READ_TOKENS, total)) for first in range(0, total, _READ_TOKENS))
    highest = max((int(part.max()) for part in parts), default=-1)
    if highest >= tokenizer.vocab_size:
        raise DataError(
            f"{prefix} holds the id {highest}, but the checkpoint's tokenizer ends at {tokenizer.vocab_size - 1}. "
            "Preprocess the text with the checkpoint's tokenizer."
        )
    return indexed


def describe_texts(texts: TextInput) -> ColumnsAndFacts:
    """Return (columns of values per document, such as words and bytes; facts about the whole text, such as its hash and
    how it was counted). Raise DataError if the texts have only blanks.
    """
    documents = texts.documents
    words = [len(document.split()) for document in documents]
    num_bytes = [len(document.encode()) for document in documents]
    if any(num_bytes) and not any(words):
        raise DataError(f"{texts.name} holds no word, only {sum(num_bytes)} blank bytes. Give a file with text.")
    return {"words": np.array(words, np.float64), "bytes": np.array(num_bytes, np.float64)}, {
        "text_sha256": texts.sha256,
        "notes": {"text_sha256_of": texts.sha256_of, **count_odd_characters(*documents)},
        "num_documents": len(documents),
        "num_words": sum(words),
        "words_rule": "len(text.split())",
        "num_bytes": sum(num_bytes),
        "bytes_rule": "UTF-8 bytes of the documents",
    }


def describe_dataset(indexed: IndexedDataset, documents: Iterable[Tokens], tokenizer: Tokenizer) -> ColumnsAndFacts:
    """Return (a column with the bytes of each document; facts about the whole dataset, such as its hash and how it was
    counted). `documents` are the token ids of each of its documents, without special tokens.
    """
    decoded = np.array([len(tokenizer.decode(tokens.tolist()).encode()) for tokens in documents], np.float64)
    num_bytes, rule = int(decoded.sum()), "UTF-8 bytes of the decoded tokens"
    if indexed.info is not None:  # because: the tokens lack the characters that a tokenizer drops
        num_bytes, rule = indexed.info.num_bytes, "UTF-8 bytes of the source text, as the dataset's sidecar says"
    sha256 = hashlib.sha256()
    for shard in indexed.shards:
        sha256.update(shard.token_bytes.bytes.data)
        shard.check_intact()
    return {"bytes": decoded * ratio(num_bytes, decoded.sum())}, {
        "text_sha256": sha256.hexdigest(),
        "notes": {"text_sha256_of": "the .bin file"},
        "num_documents": indexed.num_documents,
        "num_words": None,
        "words_rule": "not counted in a dataset",
        "num_bytes": num_bytes,
        "bytes_rule": rule,
    }


def group_by_file(files: dict[str, int]) -> dict[str, NDArray[np.int64]]:
    """Return file name -> indices of its documents. `files` has the number of documents in each file, in order. Empty
    for a single file, or for more than MAX_GROUPS files.
    """
    if not 1 < len(files) <= MAX_GROUPS:
        return {}
    stops = np.cumsum(list(files.values()))
    return {name: np.arange(stop - count, stop) for (name, count), stop in zip(files.items(), stops, strict=True)}
