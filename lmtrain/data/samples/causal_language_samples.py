"""Samples for causal language models: runs of tokens, each labelled with the next token. numpy only.

Called by the loader. Documents are concatenated and a sample is a slice of them, read straight from the memory map;
with a document mask the batch also holds each token's document, so that attention, positions and labels stay within
documents. This file must not know steps, ranks or torch.

The conversion of rows of ids to batches (labels, document masks, the check of ids against the vocabulary) is here for
the other kinds of samples too. A row is seq_len + 1 ids as stored in the file; its last id is only ever a label.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import IGNORED, Batch
from lmtrain.data.sample_dataset_interface import Counts, Int64s
from lmtrain.data.store.document_boundaries import DocumentMap
from lmtrain.data.store.index_cache import IndexCache
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.errors import DataError
from lmtrain.runtime import compiled_helpers

ID_LIMIT = 2**31  # ids on disk are below it


def expand_runs(firsts: Int64s, counts: Int64s) -> tuple[Int64s, Int64s]:
    """Expand runs of consecutive numbers: run r is the counts[r] numbers from firsts[r] on. Return (run of each number,
    the numbers), both concatenated over all runs.
    """
    runs = np.repeat(np.arange(len(counts)), counts)
    offsets = np.cumsum(counts) - counts
    return runs, np.arange(len(runs)) + (firsts - offsets)[runs]


def check_ids(ids: NDArray[Any], vocab_size: int, prefix: Path) -> None:
    """Raise DataError if a token id is outside 0..vocab_size-1. The message names PREFIX.bin, the file that the ids are
    from.
    """
    # because: an id outside the vocabulary would crash the device without naming the file or the id
    if ids.size == 0:
        return
    high, low = int(ids.max()), 0 if ids.dtype.kind == "u" else int(ids.min())
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"{prefix}.bin holds the id {low if low < 0 else high}; the vocabulary has the ids 0 to {vocab_size - 1}. "
            "The file is damaged or was made with another tokenizer. Make the dataset again with the model's tokenizer."
        )


def read_rows(tokens: NDArray[Any], sample_ids: Int64s, seq_len: int, vocab_size: int) -> tuple[Int64s, Int64s, bool]:
    """Read samples of concatenated tokens, cut every `seq_len`: (tokens, labels, whether all ids are valid)."""
    return compiled_helpers.compiled("read_rows", read_rows_twin)(tokens, sample_ids, seq_len, vocab_size)


def read_rows_twin(
    tokens: NDArray[Any], sample_ids: Int64s, seq_len: int, vocab_size: int
) -> tuple[Int64s, Int64s, bool]:
    """Compute `read_rows` in numpy: read samples of seq_len tokens, of which sample i begins at token i * seq_len.
    Return (tokens, labels, whether all ids are in the vocabulary); a label is the next token. Raise IndexError if a
    sample is outside the tokens.
    """
    num_rows = max(len(tokens) - 1, 0) // seq_len
    if not all(0 <= sample_id < num_rows for sample_id in sample_ids.tolist()):
        raise IndexError("a sample lies outside the dataset")
    # Row i of this view is sample i. Neighbouring rows share a token.
    shape, strides = (num_rows, seq_len + 1), (seq_len * tokens.itemsize, tokens.itemsize)
    rows = np.lib.stride_tricks.as_strided(tokens, shape, strides, writeable=False)
    return _to_tokens_and_labels(rows[sample_ids], vocab_size)


def read_runs(
    tokens: NDArray[Any], starts: Int64s, sizes: Int64s, num_rows: int, seq_len: int, vocab_size: int
) -> tuple[Int64s, Int64s, bool]:
    """Read runs of sizes[r] tokens from starts[r], which fill `num_rows` rows of seq_len + 1; return as `read_rows`."""
    return compiled_helpers.compiled("read_runs", read_runs_twin)(tokens, starts, sizes, num_rows, seq_len, vocab_size)


def read_runs_twin(
    tokens: NDArray[Any], starts: Int64s, sizes: Int64s, num_rows: int, seq_len: int, vocab_size: int
) -> tuple[Int64s, Int64s, bool]:
    """Compute `read_runs` in numpy: concatenate token runs (sizes[r] tokens from starts[r]) to `num_rows` rows of
    seq_len + 1. Return (tokens, labels, whether all ids are in the vocabulary); a label is the next token. Raise
    ValueError if a run is outside the tokens or the runs do not fill the rows exactly.
    """
    if ((starts < 0) | (sizes < 0) | (sizes > len(tokens) - starts)).any() or sizes.sum() != num_rows * (seq_len + 1):
        raise ValueError("the token runs leave the dataset, or do not fill the rows exactly")
    return _to_tokens_and_labels(tokens[expand_runs(starts, sizes)[1]].reshape(num_rows, seq_len + 1), vocab_size)


def _to_tokens_and_labels(rows: NDArray[Any], vocab_size: int) -> tuple[Int64s, Int64s, bool]:
    """Return (tokens, labels, whether all ids are in the vocabulary); a label is the next token."""
    ids_valid = rows.size == 0 or (int(rows.min()) >= 0 and int(rows.max()) < vocab_size)
    return rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64), ids_valid


def build_batch(tokens_BT: Int64s, labels_BT: Int64s, document_starts: tuple[Int64s, Int64s] | None) -> Batch:
    """Return a Batch of these tokens and labels. `document_starts` are (rows, columns) of the tokens that begin a
    document; if given, attention and positions stay within each document, and so do labels, which are changed in place.

    `document_starts` are in order, with columns from 1 to seq_len; a row's first token, column 0, is not listed.
    """
    if document_starts is None:
        return Batch(tokens_BT, labels_BT)
    labels_BT[document_starts[0], document_starts[1] - 1] = IGNORED
    num_rows, seq_len = tokens_BT.shape
    return Batch(tokens_BT, labels_BT, *document_positions(num_rows, seq_len, *document_starts))


def document_positions(num_rows: int, seq_len: int, rows: Int64s, columns: Int64s) -> tuple[Int64s, NDArray[np.int32]]:
    """Return two arrays [num_rows, seq_len]: each token's position within its document, and the number of its document
    within its row. A document begins at each row's first token and at each (rows[i], columns[i]).
    """
    inside = columns < seq_len
    firsts = np.sort(np.concatenate([np.arange(num_rows) * seq_len, rows[inside] * seq_len + columns[inside]]))
    return compiled_helpers.compiled("separate", document_positions_twin)(firsts, num_rows, seq_len)


def document_positions_twin(firsts: Int64s, num_rows: int, seq_len: int) -> tuple[Int64s, NDArray[np.int32]]:
    """Compute `document_positions` in numpy: return each token's position within its document, and the number of its
    document within its row. `firsts` are the ascending flat indices at which a row or a document begins.
    """
    counts = np.diff(firsts, append=num_rows * seq_len)
    numbers = np.arange(len(firsts)) - np.searchsorted(firsts, firsts // seq_len * seq_len)
    positions = np.arange(num_rows * seq_len) - np.repeat(firsts, counts)
    return positions.reshape(num_rows, seq_len), np.repeat(numbers.astype(np.int32), counts).reshape(num_rows, seq_len)


class SampleIndex:
    """Positions of samples in concatenated documents: sample k begins k * seq_len tokens after the first token.

    `tokens` restricts the samples to this range of the dataset's tokens, for documents that are split between training
    and validation.
    """

    def __init__(
        self, map_: DocumentMap, documents: range, seq_len: int, tokens: range | None = None
    ) -> None:
        self.map, self.seq_len, self.documents = map_, seq_len, documents
        tokens = range(self.map.start(documents.start), self.map.start(documents.stop)) if tokens is None else tokens
        self.first_token, self.num_tokens = tokens.start, len(tokens)

    @property
    def num_samples(self) -> int:
        return max(self.num_tokens - 1, 0) // self.seq_len

    def document_starts(self, sample_ids: Int64s) -> tuple[Int64s, Int64s]:
        """Return (rows, columns) of the tokens that begin a document, in a batch whose row i is the sample
        sample_ids[i]. Tokens in column 0 are not listed.
        """
        first = sample_ids * np.int64(self.seq_len) + self.first_token
        low, high = np.split(self.map.find(np.concatenate([first, first + self.seq_len])), 2)
        rows, documents = expand_runs(low + 1, high - low)
        columns = self.map.starts(documents) - first[rows]
        # because: an empty document begins where the next one does, and before a row's first token it is not in the row
        new = np.append(True, (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1]))[: len(rows)] & (columns > 0)
        return rows[new], columns[new]

    def document_spans(self, sample_id: int) -> list[tuple[int, int, int]]:
        """Return (document number, start, stop) of each document that has tokens in a sample, including the token after
        the sample that is its last label. `start` and `stop` are token offsets within the document.
        """
        first = sample_id * self.seq_len + self.first_token
        last, spans = first + self.seq_len + 1, []
        while first < last:
            document = int(self.map.find(np.array([first]))[0])
            begin, end = self.map.starts(np.array([document, document + 1])).tolist()
            spans.append((document, first - begin, min(end, last) - begin))
            first = min(end, last)
        return spans


class CausalDataset:
    """Dataset of concatenated documents, cut every seq_len tokens. `tokens` restricts it as in `SampleIndex`."""

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        seq_len: int,
        document_mask: bool = False,
        vocab_size: int = ID_LIMIT,
        cache: IndexCache | None = None,
        tokens: range | None = None,
    ) -> None:
        self.index = SampleIndex(DocumentMap.of(indexed, cache), documents, seq_len, tokens)
        require_samples(indexed, documents, seq_len, self.index.num_samples, self.index.num_tokens)
        self.prefix, self.seq_len, self.document_mask = indexed.prefix, seq_len, document_mask
        self._indexed, self._sizes, self._vocab_size = indexed, np.array([seq_len + 1]), vocab_size

    @property
    def num_samples(self) -> int:
        return self.index.num_samples

    def counts(self, sample_ids: Int64s) -> Counts:
        """Return the number of labels and of tokens in these samples. With a document mask a document's last token has
        no label.
        """
        unlabelled = len(self.index.document_starts(sample_ids)[0]) if self.document_mask else 0
        tokens = len(sample_ids) * self.seq_len
        return Counts(tokens - unlabelled, tokens)

    def batch(self, sample_ids: Int64s) -> Batch:
        first, seq_len = self.index.first_token, self.seq_len
        if isinstance(self._indexed.tokens, np.ndarray):
            tokens = self._indexed.tokens[first : first + self.num_samples * seq_len + 1]
            tokens_BT, labels_BT, ids_valid = read_rows(tokens, sample_ids, seq_len, self._vocab_size)
        else:
            tokens, places = self._indexed.gather(first + sample_ids * seq_len, self._sizes)
            sizes = np.full(len(sample_ids), seq_len + 1)
            tokens_BT, labels_BT, ids_valid = read_runs(
                tokens, places, sizes, len(sample_ids), seq_len, self._vocab_size
            )
        self._indexed.check(sample_ids, self._sizes, self.seq_len, self.index.first_token)
        if not ids_valid:
            check_ids(np.stack([tokens_BT, labels_BT]), self._vocab_size, self.prefix)
        return build_batch(tokens_BT, labels_BT, self.index.document_starts(sample_ids) if self.document_mask else None)


def require_samples(indexed: IndexedDataset, documents: range, seq_len: int, num_samples: int, num_tokens: int) -> None:
    """Raise DataError if `num_samples`, the number of samples that these documents give, is 0. The other arguments
    appear in the message.
    """
    if num_samples == 0:
        raise DataError(
            f"data.split gives 0 samples of {seq_len} tokens: its {len(documents)} of the {indexed.num_documents} "
            f"documents of {indexed.prefix} hold {num_tokens} tokens. Give more data, a larger share of data.split or "
            "a shorter sequence."
        )
