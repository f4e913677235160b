"""Samples of whole documents: one per row, or packed by best fit. numpy, with the best fit in csrc/.

Called by the loader if documents must not continue from one sample into the next. A document of n tokens takes n - 1
positions, because its last token is only ever a label; a document longer than a row is cut into full rows and a rest.
Nothing else is ever cut. The rest of a row is padding: id 0, labels ignored. Best fit packs a million documents at a
time, largest stretches first, each into the fullest row with room.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import IGNORED, Batch
from lmtrain.data.sample_dataset_interface import Counts, Int64s
from lmtrain.data.samples.causal_language_samples import (
    ID_LIMIT,
    check_ids,
    document_positions,
    expand_runs,
    require_samples,
)
from lmtrain.data.store.document_boundaries import DocumentMap, index_identity
from lmtrain.data.store.index_cache import Index, IndexBuild, IndexCache, all_within, cache_if, is_ascending
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.runtime import compiled_helpers

WINDOW = 1 << 20  # documents that are packed together
_CACHED_FROM = 1 << 22  # documents; because: fewer documents are packed in less than a second


@dataclass(frozen=True)
class Packing:
    """Assignment of stretches (documents, or pieces of documents longer than a row) to rows of seq_len positions.

    Stretch p is sizes[p] positions from token starts[p] on; row r holds stretches bounds[r] to bounds[r + 1] - 1.
    """

    starts: Int64s
    sizes: NDArray[np.int32]
    bounds: Int64s
    filled: NDArray[np.int32]  # positions of each row that are not padding

    @classmethod
    def of(
        cls, map_: DocumentMap, documents: range, seq_len: int, kind: str,
        cache: IndexCache | None = None, identify: Callable[[], dict[str, Any]] = dict,
    ) -> Packing:  # fmt: skip
        """Return the packing of these documents into rows of seq_len positions, from the cache or computed. `kind` is
        "document" (no two documents share a row) or "best_fit"; `identify` returns what identifies the dataset in the
        cache.
        """
        inputs = {"documents": [documents.start, documents.stop], "seq_len": seq_len, "window": WINDOW}
        index = cache_if(len(documents) >= _CACHED_FROM, cache).get(
            kind, lambda: identify() | inputs, lambda build: _pack(build, map_, documents, seq_len, kind),
            lambda index: _in_range(index, map_.num_tokens, seq_len),
        )  # fmt: skip
        return cls(*(index.arrays[name] for name in ("starts", "sizes", "bounds", "filled")))

    @property
    def num_rows(self) -> int:
        return len(self.filled)

    def count_filled(self, rows: Int64s) -> int:
        """Return the number of positions in these rows that are not padding."""
        return int(self.filled[rows].sum(dtype=np.int64))


def _in_range(index: Index, num_tokens: int, seq_len: int) -> bool:
    """Return True if every entry of a cached packing is valid: the stretches of text are within the dataset's tokens,
    and rows have at most seq_len positions.
    """
    starts, sizes, bounds, filled = (index.arrays[name] for name in ("starts", "sizes", "bounds", "filled"))
    ends = (starts[i : i + WINDOW] + sizes[i : i + WINDOW] for i in range(0, len(starts), WINDOW))
    return (
        len(starts) == len(sizes)
        and len(bounds) == len(filled) + 1
        and bool(bounds[0] == 0 and bounds[-1] == len(sizes))
        and is_ascending(bounds)
        and all_within(starts, 0, num_tokens - 1)
        and all_within(sizes, 1, seq_len)
        and all_within(filled, 1, seq_len)
        # because: the token after a stretch is the stretch's last label
        and all(all_within(part, 1, num_tokens - 1) for part in ends)
    )


def _pack(build: IndexBuild, map_: DocumentMap, documents: range, seq_len: int, kind: str) -> dict[str, Any]:
    """Pack documents into rows of seq_len positions, WINDOW documents at a time, and append the four arrays of a
    Packing to `build`. `kind` is "document" (no two documents share a row) or "best_fit". Return {}, because the index
    needs no further facts.
    """
    num_stretches = 0
    build.append("bounds", "<i8", np.zeros(1, np.int64))
    for name, dtype in (("starts", "<i8"), ("sizes", "<i4"), ("filled", "<i4")):
        build.append(name, dtype, np.empty(0, dtype))
    for first in range(documents.start, documents.stop, WINDOW):
        last = min(first + WINDOW, documents.stop)
        starts, sizes = cut_documents(map_.starts(np.arange(first, last + 1)), seq_len)
        rows = np.arange(len(sizes)) if kind == "document" else best_fit(sizes, seq_len)
        in_rows = np.argsort(rows, kind="stable")
        counts = np.bincount(rows)
        build.append("starts", "<i8", starts[in_rows])
        build.append("sizes", "<i4", sizes[in_rows])
        build.append("bounds", "<i8", num_stretches + np.cumsum(counts))
        build.append("filled", "<i4", np.bincount(rows, sizes))
        num_stretches += len(sizes)
    return {}


def cut_documents(document_starts: Int64s, seq_len: int) -> tuple[Int64s, NDArray[np.int32]]:
    """Cut documents into stretches of at most seq_len positions and return (first token, size) of the stretches, as two
    arrays. A document of n tokens has n - 1 positions. `document_starts` are the documents' first tokens, and the end
    of the last document.
    """
    positions = np.maximum(np.diff(document_starts) - 1, 0)
    counts = -(-positions // seq_len)
    documents, numbers = expand_runs(np.zeros(len(counts), np.int64), counts)
    sizes = np.minimum(positions[documents] - numbers * seq_len, seq_len)
    return document_starts[:-1][documents] + numbers * seq_len, sizes.astype(np.int32)


def best_fit(sizes: NDArray[np.int32], seq_len: int) -> Int64s:
    """Pack stretches into rows of seq_len positions by best fit; return the row of each stretch.

    The largest come first, each into the fullest row with room; among equally full rows the last changed is taken.
    """
    return compiled_helpers.compiled("best_fit", best_fit_twin)(np.ascontiguousarray(sizes, np.int32), seq_len)


def best_fit_twin(sizes: NDArray[np.int32], seq_len: int) -> Int64s:
    """Compute `best_fit` in Python: pack pieces of text of sizes[i] positions into rows of seq_len, largest first, each
    into the fullest row that has room for it. Return the row of each piece.

    A sorted list holds the free sizes that occur, and a stack the rows of each free size.
    """
    result = np.empty(len(sizes), np.int64)
    rooms: list[int] = []
    rows_with: dict[int, list[int]] = {}
    num_rows = 0
    for i in np.argsort(-sizes.astype(np.int64), kind="stable").tolist():
        size = int(sizes[i])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            row, room, num_rows = num_rows, seq_len, num_rows + 1
        else:
            room = rooms[at]
            row = rows_with[room].pop()
            if not rows_with[room]:
                del rooms[at]
        result[i] = row
        room -= size
        if room > 0:
            if not rows_with.setdefault(room, []):
                insort(rooms, room)
            rows_with[room].append(row)
    return result


class PackedDataset:
    """Dataset whose samples are the rows of a packing. With a document mask, attention stays within each document."""

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        seq_len: int,
        kind: str,
        document_mask: bool,
        vocab_size: int = ID_LIMIT,
        cache: IndexCache | None = None,
    ) -> None:
        map_ = DocumentMap.of(indexed, cache)
        self.packing = Packing.of(map_, documents, seq_len, kind, cache, lambda: index_identity(indexed))
        require_samples(indexed, documents, seq_len, self.packing.num_rows, len(documents) and indexed.num_tokens)
        self.prefix, self.seq_len, self.document_mask = indexed.prefix, seq_len, document_mask
        self._indexed, self._vocab_size = indexed, vocab_size

    @property
    def num_samples(self) -> int:
        return self.packing.num_rows

    def counts(self, sample_ids: Int64s) -> Counts:
        """Count labels and tokens, which are equal, because a document's last token has no place in a row."""
        filled = self.packing.count_filled(sample_ids)
        return Counts(filled, filled)

    def batch(self, sample_ids: Int64s) -> Batch:
        num_rows, seq_len, packing = len(sample_ids), self.seq_len, self.packing
        first_stretch = packing.bounds[sample_ids]
        rows, stretches = expand_runs(first_stretch, packing.bounds[sample_ids + 1] - first_stretch)
        sizes = packing.sizes[stretches].astype(np.int64)
        offsets = np.cumsum(sizes) - sizes  # positions in the batch before each stretch
        columns = offsets - offsets[np.searchsorted(rows, np.arange(num_rows))][rows]
        targets, starts = rows * seq_len + columns, packing.starts[stretches]
        tokens, places = self._indexed.gather(starts, sizes + 1)
        tokens_BT, labels_BT, ids_valid = copy_rows(
            tokens, places, sizes, targets, num_rows, seq_len, self._vocab_size
        )
        self._indexed.check(starts, sizes + 1)
        if not ids_valid:
            check_ids(tokens_BT, self._vocab_size, self.prefix)
            check_ids(np.where(labels_BT == IGNORED, 0, labels_BT), self._vocab_size, self.prefix)
        if not self.document_mask:
            return Batch(tokens_BT, labels_BT)
        padding = np.flatnonzero(packing.filled[sample_ids] < seq_len)  # padding is a document of its own
        begins = np.concatenate([rows, padding]), np.concatenate([columns, packing.filled[sample_ids][padding]])
        inner = begins[1] > 0
        return Batch(tokens_BT, labels_BT, *document_positions(num_rows, seq_len, begins[0][inner], begins[1][inner]))


def copy_rows(
    tokens: NDArray[Any], starts: Int64s, sizes: Int64s, targets: Int64s, num_rows: int, seq_len: int, vocab_size: int
) -> tuple[Int64s, Int64s, bool]:
    """Copy sizes[p] tokens from starts[p] to targets[p] for all p; return (tokens, labels, whether all ids are valid).

    A label is the next token. Targets ascend and are flat indices into `num_rows` rows of seq_len. Positions without a
    stretch get id 0 and no label.
    """
    copy_rows = compiled_helpers.compiled("pack_rows", copy_rows_twin)
    return copy_rows(tokens, starts, sizes, targets, num_rows, seq_len, vocab_size)


def copy_rows_twin(
    tokens: NDArray[Any], starts: Int64s, sizes: Int64s, targets: Int64s, num_rows: int, seq_len: int, vocab_size: int
) -> tuple[Int64s, Int64s, bool]:
    """Compute `copy_rows` in numpy: copy sizes[p] tokens from tokens[starts[p]] to the flat position targets[p] of the
    batch, for all p. Return (tokens, labels, whether all ids are in the vocabulary); a label is the next token.
    """
    ids, labels = np.zeros(num_rows * seq_len, np.int64), np.full(num_rows * seq_len, IGNORED, np.int64)
    source, target = expand_runs(starts, sizes)[1], expand_runs(targets, sizes)[1]
    ids[target], labels[target] = tokens[source], tokens[source + 1]
    both = np.concatenate([ids[target], labels[target]])
    ids_valid = bool(((both >= 0) & (both < vocab_size)).all())
    return ids.reshape(num_rows, seq_len), labels.reshape(num_rows, seq_len), ids_valid
