"""Samples of a causal language model: runs of tokens, each token's label the one after it. numpy only.

Called by the loader. Documents lie end to end and a sample is a cut of them, read straight from the memory map; with a
document mask it also says which document each token is of, so that attention, positions and labels stay within
documents. Must not know steps, ranks or torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import Batch
from lmtrain.data.dataset import Counts
from lmtrain.data.samples.rows import check_ids, ragged, read_rows, with_documents
from lmtrain.data.store.documents import DocumentMap
from lmtrain.data.store.index_cache import IndexCache
from lmtrain.data.store.indexed import IndexedDataset
from lmtrain.errors import DataError

Int64s = NDArray[np.int64]


class SampleIndex:
    """Samples of some consecutive documents, counted in tokens from the first document's first.

    `tokens` takes fewer: a range of the dataset's tokens, where a document is cut between training and validation.
    """

    def __init__(
        self,
        lengths: NDArray[np.integer] | DocumentMap,
        documents: range,
        seq_len: int,
        tokens: range | None = None,
    ) -> None:
        self.map = lengths if isinstance(lengths, DocumentMap) else DocumentMap.from_lengths(lengths)
        self.seq_len, self.documents = seq_len, documents
        tokens = range(self.map.start(documents.start), self.map.start(documents.stop)) if tokens is None else tokens
        self.first_token, self.num_tokens = tokens.start, len(tokens)

    @property
    def num_samples(self) -> int:
        return max(self.num_tokens - 1, 0) // self.seq_len

    def begins(self, sample_ids: Int64s) -> tuple[Int64s, Int64s]:
        """The tokens of these samples, but for the first of each, with which a document begins: (row, place)."""
        first = sample_ids * np.int64(self.seq_len) + self.first_token
        low, high = np.split(self.map.find(np.concatenate([first, first + self.seq_len])), 2)
        rows, documents = ragged(low + 1, high - low)
        places = self.map.starts(documents) - first[rows]
        # An empty document begins where the next one does, and in front of a row's first document it is not in it.
        new = np.append(True, (rows[1:] != rows[:-1]) | (places[1:] != places[:-1]))[: len(rows)] & (places > 0)
        return rows[new], places[new]

    def spans(self, sample_id: int) -> list[tuple[int, int, int]]:
        """The sample in words: (document, first token, one past the last token), in order."""
        first = sample_id * self.seq_len + self.first_token
        last, spans = first + self.seq_len + 1, []
        while first < last:
            document = int(self.map.find(np.array([first]))[0])
            begin, end = self.map.starts(np.array([document, document + 1])).tolist()
            spans.append((document, first - begin, min(end, last) - begin))
            first = min(end, last)
        return spans


class CausalDataset:
    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        seq_len: int,
        document_mask: bool = False,
        vocab_size: int | None = None,
        cache: IndexCache | None = None,
        tokens: range | None = None,
    ) -> None:
        self.index = SampleIndex(DocumentMap.of(indexed, cache), documents, seq_len, tokens)
        refuse_none(indexed, documents, seq_len, self.index.num_samples, self.index.num_tokens)
        self.prefix, self.seq_len, self.document_mask = indexed.prefix, seq_len, document_mask
        self._indexed, self._sizes = indexed, np.array([seq_len + 1])
        self._vocab_size = vocab_size or known_vocab_size(indexed)
        first = self.index.first_token
        self._tokens: NDArray[Any] = indexed.tokens[first : first + self.num_samples * seq_len + 1]

    @property
    def num_samples(self) -> int:
        return self.index.num_samples

    def counts(self, sample_ids: Int64s) -> Counts:
        """With a document mask a document's last token is no label."""
        crossing = len(self.index.begins(sample_ids)[0]) if self.document_mask else 0
        tokens = len(sample_ids) * self.seq_len
        return Counts(tokens - crossing, tokens)

    def batch(self, sample_ids: Int64s) -> Batch:
        tokens_BT, labels_BT, known = read_rows(self._tokens, sample_ids, self.seq_len, self._vocab_size)
        self._indexed.check(sample_ids, self._sizes, self.seq_len, self.index.first_token)
        if not known:
            check_ids(np.stack([tokens_BT, labels_BT]), self._vocab_size, self.prefix)
        return with_documents(tokens_BT, labels_BT, self.index.begins(sample_ids) if self.document_mask else None)


def known_vocab_size(indexed: IndexedDataset) -> int:
    return indexed.info.vocab_size if indexed.info else 2**31


def refuse_none(indexed: IndexedDataset, documents: range, seq_len: int, num_samples: int, num_tokens: int) -> None:
    if num_samples == 0:
        raise DataError(
            f"data.split gives 0 samples of {seq_len} tokens: its {len(documents)} of the {indexed.num_documents} "
            f"documents of {indexed.prefix} hold {num_tokens} tokens. Use more data, a larger share of data.split or "
            "a shorter sequence."
        )
