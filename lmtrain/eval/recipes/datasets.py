"""A .bin/.idx dataset as documents to score or to count: opened, and checked to speak the checkpoint's tokens.

Called by the perplexity task and by the comparison with baselines; torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmtrain.data.store.documents import compare_with_record
from lmtrain.data.store.indexed import IndexedDataset, part
from lmtrain.errors import DataError
from lmtrain.eval.text.windows import Tokens
from lmtrain.runtime.files.holes import refuse_hole
from lmtrain.tokenizer.base import Tokenizer

_TOKENS = 1 << 24  # read at once


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
    highest = _highest(indexed)
    if highest >= tokenizer.vocab_size:
        raise DataError(
            f"{prefix} holds token {highest}, and the checkpoint knows {tokenizer.vocab_size}. "
            "Preprocess the text with the checkpoint's tokenizer."
        )
    return indexed


def _highest(indexed: IndexedDataset) -> int:
    """Every token is read once, and compared with the checksums that it was written with."""
    highest = -1
    for first in range(0, indexed.num_tokens, _TOKENS):
        highest = max(highest, int(indexed.read(first, min(first + _TOKENS, indexed.num_tokens)).max()))
    return highest
