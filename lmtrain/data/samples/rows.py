"""Rows of token ids into batches: labels, document masks, and the check that every id is of the vocabulary. numpy only.

Called by the kinds of datasets. A row is seq_len + 1 ids as they lie in the file; its last id is only ever a label.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain import native
from lmtrain.batch import IGNORED, Batch
from lmtrain.errors import DataError

Int64s = NDArray[np.int64]


def ragged(first: Int64s, counts: Int64s) -> tuple[Int64s, Int64s]:
    """Runs first[r], first[r] + 1, ... of counts[r] numbers, end to end: (the run each is of, the numbers)."""
    runs = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return runs, np.arange(len(runs)) + (first - before)[runs]


def check_ids(ids: NDArray[Any], vocab_size: int, prefix: Path) -> None:
    # because: an id outside the vocabulary would end in a crash of the device that names nothing
    if ids.size == 0:
        return
    high, low = int(ids.max()), 0 if ids.dtype.kind == "u" else int(ids.min())
    if low < 0 or high >= vocab_size:
        wrong = f"{low}; ids begin at 0" if low < 0 else f"{high}; the vocabulary ends at {vocab_size - 1}"
        raise DataError(f"{prefix}.bin holds the id {wrong}. It is damaged or of another tokenizer.")


def read_rows(tokens: NDArray[Any], sample_ids: Int64s, seq_len: int, vocab_size: int) -> tuple[Int64s, Int64s, bool]:
    """Samples of tokens that lie end to end, cut every `seq_len`: (tokens, labels, whether all are in 0..vocab)."""
    return native.compiled("read_rows", read_rows_twin)(tokens, sample_ids, seq_len, vocab_size)


def read_rows_twin(
    tokens: NDArray[Any], sample_ids: Int64s, seq_len: int, vocab_size: int
) -> tuple[Int64s, Int64s, bool]:
    num = max(len(tokens) - 1, 0) // seq_len
    if not all(0 <= number < num for number in sample_ids.tolist()):
        raise IndexError("a sample lies outside the tokens")
    # Row i of this view is sample i. Neighbours share a token.
    shape, strides = (num, seq_len + 1), (seq_len * tokens.itemsize, tokens.itemsize)
    return _shifted(np.lib.stride_tricks.as_strided(tokens, shape, strides, writeable=False)[sample_ids], vocab_size)


def read_runs(
    tokens: NDArray[Any], starts: Int64s, sizes: Int64s, num: int, seq_len: int, vocab_size: int
) -> tuple[Int64s, Int64s, bool]:
    """The same of runs, sizes[r] tokens from starts[r] on, that end to end are `num` rows of seq_len + 1."""
    return native.compiled("read_runs", read_runs_twin)(tokens, starts, sizes, num, seq_len, vocab_size)


def read_runs_twin(
    tokens: NDArray[Any], starts: Int64s, sizes: Int64s, num: int, seq_len: int, vocab_size: int
) -> tuple[Int64s, Int64s, bool]:
    if ((starts < 0) | (sizes < 0) | (sizes > len(tokens) - starts)).any() or sizes.sum() != num * (seq_len + 1):
        raise ValueError("a run lies outside the tokens or the rows")
    return _shifted(tokens[ragged(starts, sizes)[1]].reshape(num, seq_len + 1), vocab_size)


def _shifted(rows: NDArray[Any], vocab_size: int) -> tuple[Int64s, Int64s, bool]:
    """Tokens, and for each the one after it as its label."""
    known = rows.size == 0 or (int(rows.min()) >= 0 and int(rows.max()) < vocab_size)
    return rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64), known


def with_documents(tokens_BT: Int64s, labels_BT: Int64s, begins: tuple[Int64s, Int64s] | None) -> Batch:
    """A batch of both. With `begins` no label reaches into the next document: positions and attention stay within each.

    They are the (row, place) with which a document begins, in order, places counted from 1 to seq_len: that a row
    begins with its first token needs no word.
    """
    if begins is None:
        return Batch(tokens_BT, labels_BT)
    labels_BT[begins[0], begins[1] - 1] = IGNORED
    num, seq_len = tokens_BT.shape
    return Batch(tokens_BT, labels_BT, *separate(num, seq_len, *begins))


def separate(num: int, seq_len: int, rows: Int64s, places: Int64s) -> tuple[Int64s, NDArray[np.int32]]:
    """Positions that count from the first token of each document, and which document of its row each token is of."""
    inside = places < seq_len
    firsts = np.sort(np.concatenate([np.arange(num) * seq_len, rows[inside] * seq_len + places[inside]]))
    return native.compiled("separate", separate_twin)(firsts, num, seq_len)


def separate_twin(firsts: Int64s, num: int, seq_len: int) -> tuple[Int64s, NDArray[np.int32]]:
    """The same from the places, counted through all rows, at which a row or a document begins."""
    counts = np.diff(firsts, append=num * seq_len)
    in_row = np.arange(len(firsts)) - np.searchsorted(firsts, firsts // seq_len * seq_len)
    positions = np.arange(num * seq_len) - np.repeat(firsts, counts)
    return positions.reshape(num, seq_len), np.repeat(in_row.astype(np.int32), counts).reshape(num, seq_len)
