"""Samples of a causal language model: runs of tokens, each token's label the one after it. numpy only.

Called by the loader. Reads rows straight from the memory map; with a document mask it also says which document each
token is of, so that attention, positions and labels stay within documents. Must not know steps, ranks or torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import IGNORED, Batch
from lmtrain.data.format import IndexedDataset
from lmtrain.data.sample_index import SampleIndex
from lmtrain.errors import DataError

Int64s = NDArray[np.int64]


class CausalDataset:
    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        seq_len: int,
        document_mask: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        starts = indexed.document_starts()
        self.index = SampleIndex(np.diff(starts), documents, seq_len)
        if self.index.num_samples == 0:
            raise DataError(
                f"data.split gives 0 samples of {seq_len} tokens: its {len(documents)} of the {indexed.num_documents} "
                f"documents of {indexed.prefix} hold {self.index.num_tokens} tokens. Use more data, a larger share of "
                "data.split or a shorter sequence."
            )
        self.prefix, self.seq_len, self.document_mask = indexed.prefix, seq_len, document_mask
        self._tokens: NDArray[Any] = indexed.tokens[starts[documents.start] : starts[documents.stop]]
        self._vocab_size = vocab_size or (indexed.info.vocab_size if indexed.info else 2**31)

    @property
    def num_samples(self) -> int:
        return self.index.num_samples

    def num_labels(self, sample_ids: Int64s) -> int:
        """Labels that take part in the loss; cheap enough to count a whole global batch on every rank."""
        crossing = int(self.index.num_crossings(sample_ids).sum()) if self.document_mask else 0
        return len(sample_ids) * self.seq_len - crossing

    def batch(self, sample_ids: Int64s) -> Batch:
        places_BT = self.index.starts(sample_ids)[:, None] + np.arange(self.seq_len + 1)
        rows_BT = self._tokens[places_BT].astype(np.int64)
        self._check_ids(rows_BT)
        tokens_BT, labels_BT = rows_BT[:, :-1].copy(), rows_BT[:, 1:].copy()
        if not self.document_mask:
            return Batch(tokens_BT, labels_BT)
        which_BT = self.index.which(places_BT)
        labels_BT[which_BT[:, 1:] != which_BT[:, :-1]] = IGNORED
        # A document that began in an earlier sample counts from where this row begins.
        first_BT = np.maximum(self.index.begins(which_BT), places_BT[:, :1])
        documents_BT = (which_BT - which_BT[:, :1])[:, :-1].astype(np.int32)
        return Batch(tokens_BT, labels_BT, (places_BT - first_BT)[:, :-1].copy(), documents_BT)

    def _check_ids(self, rows_BT: Int64s) -> None:
        # because: an id outside the vocabulary would end in a crash of the device that names nothing
        low, high = int(rows_BT.min()), int(rows_BT.max())
        if low < 0 or high >= self._vocab_size:
            wrong = f"{low}; ids begin at 0" if low < 0 else f"{high}; the vocabulary ends at {self._vocab_size - 1}"
            raise DataError(f"{self.prefix}.bin holds the id {wrong}. It is damaged or of another tokenizer.")
