"""What tasks that take any text say of it, whether it came as text or as a dataset. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.data.store.indexed import IndexedDataset
from lmtrain.errors import DataError
from lmtrain.eval.task import Columns, ratio
from lmtrain.eval.text.texts import TextInput, oddities
from lmtrain.eval.text.windows import Tokens
from lmtrain.tokenizer.base import Tokenizer

MOST_GROUPS = 100  # because: a folder of small files is one text to whoever asks, not thousands
Said = tuple[Columns, dict[str, Any]]  # of every document, and of all of them: some of a task's Facts


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
