"""What tasks that take any text say of it, whether it came as text or as a dataset. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.data.store.documents import compare_with_record
from lmtrain.data.store.indexed import IndexedDataset, part
from lmtrain.errors import DataError
from lmtrain.eval.task import Columns, ratio
from lmtrain.eval.texts import TextInput, oddities
from lmtrain.eval.windows import Tokens
from lmtrain.runtime.files.files import refuse_hole
from lmtrain.tokenizer.base import Tokenizer

_TOKENS = 1 << 24  # read at once
MOST_GROUPS = 100  # because: a folder of small files is one text to whoever asks, not thousands
Said = tuple[Columns, dict[str, Any]]  # of every document, and of all of them: some of a task's Facts


@dataclass(frozen=True)
class DatasetSequences:
    """A dataset's documents, each behind one end-of-document token and without the one it may end in."""

    indexed: IndexedDataset
    eod_id: int

    def __iter__(self) -> Iterator[Tokens]:
        for document in range(self.indexed.num_documents):
            tokens = self.indexed.document(document)
            if len(tokens) and tokens[-1] == self.eod_id:
                tokens = tokens[:-1]
            yield np.concatenate([np.array([self.eod_id], np.int64), tokens.astype(np.int64)])


def dataset_prefix(source: Path) -> Path | None:
    """The prefix behind PREFIX, PREFIX.bin or PREFIX.idx; None for anything else."""
    if source.suffix in (".bin", ".idx"):
        return source.with_suffix("")
    return source if Path(f"{source}.idx").exists() else None


def open_dataset(prefix: Path, tokenizer: Tokenizer) -> IndexedDataset:
    """Refuses a dataset of another tokenizer, as far as can be known."""
    indexed = IndexedDataset.open(prefix)
    if indexed.info is not None and indexed.info.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{prefix} was made with the tokenizer {indexed.info.tokenizer_fingerprint[:12]}, and the checkpoint has "
            f"{tokenizer.fingerprint[:12]}. Preprocess the text with the checkpoint's tokenizer."
        )
    compare_with_record(indexed)
    refuse_hole(part(prefix, ".bin"))
    total = indexed.num_tokens
    # every token is read once, and compared with the checksums that it was written with
    parts = (indexed.read(first, min(first + _TOKENS, total)) for first in range(0, total, _TOKENS))
    highest = max((int(part.max()) for part in parts), default=-1)
    if highest >= tokenizer.vocab_size:
        raise DataError(
            f"{prefix} holds token {highest}, and the checkpoint knows {tokenizer.vocab_size}. "
            "Preprocess the text with the checkpoint's tokenizer."
        )
    return indexed


def said_of_texts(texts: TextInput) -> Said:
    documents = texts.documents
    words, num_bytes = [len(one.split()) for one in documents], [len(one.encode()) for one in documents]
    if any(num_bytes) and not any(words):
        raise DataError(f"{texts.name} holds no word, only {sum(num_bytes)} blank bytes. Give a file with text.")
    return {"words": np.array(words, np.float64), "bytes": np.array(num_bytes, np.float64)}, {
        "text_sha256": texts.sha256,
        "notes": {"text_sha256_of": texts.sha256_of, **oddities(*documents)},
        "num_documents": len(documents),
        "num_words": sum(words),
        "words_rule": "len(text.split())",
        "num_bytes": sum(num_bytes),
        "bytes_rule": "UTF-8 bytes of the documents",
    }


def said_of_dataset(prefix: Path, indexed: IndexedDataset, documents: Iterable[Tokens], tokenizer: Tokenizer) -> Said:
    """`documents`: the tokens of each, without any that stand for no text."""
    decoded = np.array([len(tokenizer.decode(tokens.tolist()).encode()) for tokens in documents], np.float64)
    num_bytes, rule = int(decoded.sum()), "UTF-8 bytes of the decoded tokens"
    if indexed.info is not None:  # because: what a tokenizer drops of a text is not in its tokens
        num_bytes, rule = indexed.info.num_bytes, "UTF-8 bytes of the source text, as the dataset's sidecar says"
    with open(f"{prefix}.bin", "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": decoded * ratio(num_bytes, decoded.sum())}, {
        "text_sha256": sha256,
        "notes": {"text_sha256_of": "the .bin file"},
        "num_documents": indexed.num_documents,
        "num_words": None,
        "words_rule": "not counted in a dataset",
        "num_bytes": num_bytes,
        "bytes_rule": rule,
    }


def groups_of(files: dict[str, int]) -> dict[str, NDArray[np.int64]]:
    """Documents by file, if there are several."""
    if not 1 < len(files) <= MOST_GROUPS:
        return {}
    stops = np.cumsum(list(files.values()))
    return {name: np.arange(stop - count, stop) for (name, count), stop in zip(files.items(), stops, strict=True)}
