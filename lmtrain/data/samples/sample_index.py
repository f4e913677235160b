"""Which tokens make a sample: documents of a split laid end to end and cut every `seq_len` tokens. Pure numpy.

Called by causal.py. A sample is seq_len + 1 tokens, the last of which is the first of the next sample, so that every
token but the first is a label exactly once. Nothing is stored a sample: the index is where documents begin, whatever
the length of a run. All arithmetic is 64-bit. Must not know how samples are ordered; that is order.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lmtrain.data.samples.rows import ragged
from lmtrain.data.store.documents import DocumentMap

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

    def starts(self, sample_ids: Int64s) -> Int64s:
        """The first token of each sample."""
        return sample_ids * np.int64(self.seq_len)

    def begins(self, sample_ids: Int64s) -> tuple[Int64s, Int64s]:
        """The tokens of these samples, but for the first of each, with which a document begins: (row, place)."""
        first = self.starts(sample_ids) + self.first_token
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
