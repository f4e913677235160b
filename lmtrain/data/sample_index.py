"""Which tokens make a sample: documents of a split laid end to end and cut every `seq_len` tokens. Pure numpy.

Called by causal.py. A sample is seq_len + 1 tokens, the last of which is the first of the next sample, so that every
token but the first is a label exactly once. Nothing is stored a sample: the index is where documents end, whatever
the length of a run. All arithmetic is 64-bit. Must not know how samples are ordered; that is order.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lmtrain.data.format import IndexedDataset

Int64s = NDArray[np.int64]


def split_documents(num: int, ratios: Sequence[float]) -> tuple[range, range, range]:
    """Documents of train, validation and test: consecutive ranges in these proportions, each document in one."""
    shares = [float(ratio) for ratio in ratios] + [0.0] * (3 - len(ratios))
    total = sum(shares)
    bounds = [round(sum(shares[:i]) / total * num) for i in range(4)]
    return range(bounds[0], bounds[1]), range(bounds[1], bounds[2]), range(bounds[2], bounds[3])


class SampleIndex:
    """Samples of some consecutive documents. `lengths` are the tokens of every document of the dataset."""

    def __init__(self, lengths: NDArray[np.integer], documents: range, seq_len: int) -> None:
        self.seq_len, self.documents = seq_len, documents
        ends = np.cumsum(lengths[documents.start : documents.stop], dtype=np.int64)
        filled = np.flatnonzero(lengths[documents.start : documents.stop])
        self._document = filled + documents.start  # empty documents hold no token, so no token is looked up in them
        self._ends: Int64s = ends[filled]
        self.num_tokens = int(ends[-1]) if len(ends) else 0

    @classmethod
    def of(cls, dataset: IndexedDataset, documents: range, seq_len: int) -> SampleIndex:
        return cls(np.diff(dataset.document_starts()), documents, seq_len)

    @property
    def num_samples(self) -> int:
        return max(self.num_tokens - 1, 0) // self.seq_len

    def starts(self, sample_ids: Int64s) -> Int64s:
        """The first token of each sample, counted from the first document's first token."""
        return sample_ids * np.int64(self.seq_len)

    def which(self, tokens: Int64s) -> Int64s:
        """For each token its document, as a position among those that are not empty."""
        return np.searchsorted(self._ends, tokens, side="right")

    def begins(self, which: Int64s) -> Int64s:
        """The first token of each document that `which` named."""
        return np.where(which > 0, self._ends[which - 1], 0)

    def num_crossings(self, sample_ids: Int64s) -> Int64s:
        """How many labels of each sample are the first token of a document."""
        first = self.starts(sample_ids)
        return self.which(first + self.seq_len) - self.which(first)

    def spans(self, sample_id: int) -> list[tuple[int, int, int]]:
        """The sample in words: (document, first token, one past the last token), in order."""
        first = sample_id * self.seq_len
        last, spans = first + self.seq_len + 1, []
        at = int(self.which(np.array([first]))[0])
        while first < last:
            begin = int(self._ends[at - 1]) if at else 0
            stop = min(int(self._ends[at]), last)
            spans.append((int(self._document[at]), first - begin, stop - begin))
            first, at = stop, at + 1
        return spans
