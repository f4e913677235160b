"""Maps documents to their first tokens and back, in bounded memory for any number of documents. Torch-free.

Called by every module that needs document boundaries. The .idx is itself a table of cumulative sizes, so no array of
its length is kept in memory: a search starts from the first tokens of every 256th document and ends in the
memory-mapped .idx. The first tokens are collected in the one pass that also checks every entry of the .idx against its
neighbours. The result of this pass is an index of index_cache.py, built once per dataset.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.data.store.index_cache import Index, IndexCache, all_within, cache_if, is_ascending
from lmtrain.data.store.indexed_dataset import IndexedDataset, dataset_file, sequence_starts
from lmtrain.errors import DataError
from lmtrain.runtime import compiled_helpers
from lmtrain.runtime.terminal_safe_text import warn

Int64s = NDArray[np.int64]

ALL_IN_MEMORY = 1 << 22  # documents; up to this many, all first tokens are kept in memory
STRIDE = 256
_CHUNK = 1 << 16  # documents checked at once, so that the arrays fit a core's cache
_CACHED_FROM = 1 << 22  # entries of an .idx; because: checking fewer takes less time than opening a cached index


class DocumentMap:
    """Map between documents and tokens. `sampled_starts`: first tokens of documents 0, stride, 2 stride, ..., end."""

    def __init__(
        self, bounds: NDArray[Any], pointers: NDArray[Any], itemsize: int, num_tokens: int, sampled_starts: Int64s,
        stride: int, one_sequence_each: bool = False,
    ) -> None:  # fmt: skip
        """Set up the map from the arrays of an .idx: `bounds` is the document index, `pointers` are in bytes.

        `one_sequence_each`: document d is sequence d, so that a search needs no lookup in the document index.
        """
        self.num_documents, self.num_tokens = len(bounds) - 1, num_tokens
        self._bounds, self._pointers, self._itemsize = bounds, pointers, itemsize
        self._sampled_starts, self._stride, self._is_one_sequence_each = sampled_starts, stride, one_sequence_each

    @classmethod
    def of(cls, dataset: IndexedDataset, cache: IndexCache | None = None) -> DocumentMap:
        """Return the map of a dataset's documents, from the cache or built while every entry of the .idx is checked.
        Raise DataError at a wrong entry.
        """
        num_documents = dataset.num_documents
        stride = 1 if num_documents <= ALL_IN_MEMORY else STRIDE
        index = cache_if(dataset.num_sequences + num_documents >= _CACHED_FROM, cache).get(
            "documents", lambda: index_identity(dataset) | {"stride": stride},
            lambda build: _check_index(dataset, stride, build.create("every", "<i8", -(-num_documents // stride))),
            lambda index: _in_range(index, -(-num_documents // stride), dataset.num_tokens),
        )  # fmt: skip
        dataset.check_intact()
        sampled_starts = np.append(index.arrays["every"], dataset.num_tokens)
        return cls(
            dataset.document_index, dataset.pointers, dataset.dtype.itemsize, dataset.num_tokens, sampled_starts,
            stride, one_sequence_each=bool(index.facts["one_each"]),
        )  # fmt: skip

    def starts(self, documents: Int64s) -> Int64s:
        """Return, for each of these document numbers, the position of its first token in the dataset. For the number
        `num_documents`, one past the last, it is the number of tokens in the dataset.
        """
        if self._stride == 1:
            return self._sampled_starts[documents]
        sequences = documents if self._is_one_sequence_each else self._bounds[documents]
        return sequence_starts(self._pointers, self._itemsize, self.num_tokens, sequences)

    def start(self, document: int) -> int:
        """Return the first token of a document."""
        return int(self.starts(np.array([document]))[0])

    def lengths(self, first: int, last: int) -> Int64s:
        """Return the number of tokens in each of documents first to last - 1."""
        return np.diff(self.starts(np.arange(first, last + 1)))

    def find(self, tokens: Int64s) -> Int64s:
        """Return, for each of these token positions, the number of the document that contains it."""
        intervals = np.searchsorted(self._sampled_starts, tokens, side="right") - 1
        if self._stride == 1:
            return intervals
        low = intervals * self._stride  # invariant: document `low` starts at or before the token, `high` after it
        high = np.minimum(low + self._stride, self.num_documents)
        while (high - low > 1).any():
            middle = (low + high) >> 1
            before = self.starts(middle) <= tokens
            low, high = np.where(before, middle, low), np.where(before, high, middle)
        return low


def split_documents(num_documents: int, ratios: Sequence[float]) -> tuple[range, range, range]:
    """Return the document ranges of training, validation and test: consecutive, sized in proportion to `ratios`."""
    shares = [float(ratio) for ratio in ratios] + [0.0] * (3 - len(ratios))
    bounds = [round(sum(shares[:i]) / sum(shares) * num_documents) for i in range(4)]
    return range(bounds[0], bounds[1]), range(bounds[1], bounds[2]), range(bounds[2], bounds[3])


def split_tokens(map_: DocumentMap, share: float, min_documents: int) -> tuple[range, range]:
    """Return the document ranges of training and validation; validation is the last documents, with as nearly as
    possible the share `share` (0 to 1) of the tokens. Training has at least one document; validation has at least
    `min_documents` if that many others exist.
    """
    num_documents, tokens = map_.num_documents, map_.num_tokens
    target = round(tokens * (1 - share))
    after = int(map_.find(np.array([min(target, tokens - 1)]))[0]) + 1  # the first document after the target
    bound = after if map_.start(after) - target <= target - map_.start(after - 1) else after - 1
    bound = max(min(bound, num_documents - min_documents), min(num_documents, 1))
    return range(bound), range(bound, num_documents)


def index_identity(dataset: IndexedDataset) -> dict[str, Any]:
    """Return a dict that identifies the content of a dataset's .idx, for use as the inputs of a cached index:
    modification time, counts, dtype, CRC-32C of the file, and the content hash in the sidecar.
    """
    return _index_facts(dataset) | {
        "idx_crc32c": dataset.index_crc, "content_sha256": dataset.info.content_sha256 if dataset.info else None,
    }  # fmt: skip


def record_path(dataset: IndexedDataset, folder: Path) -> Path:
    """Return the file where `set_verification` records block checksums of a dataset without P.blocks.

    The name depends on the .idx's modification time and counts: another dataset under the same prefix gets another
    record, damage to the tokens does not.
    """
    facts = [dataset.prefix.name, *_index_facts(dataset).values()]
    return folder / f"tokens-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]}.seen"


def use_recorded_checksums(dataset: IndexedDataset) -> None:
    """Make all later reads of a dataset's tokens compare them with the block checksums that earlier runs recorded in
    its index folder. Do nothing if nothing was recorded, or if the dataset has a .blocks file, which is used anyway.
    """
    for shard in dataset.shards:
        record = record_path(shard, index_folder(dataset))
        if shard.blocks is None and record.exists():
            shard.set_verification("read", record, warn)


def index_folder(dataset: IndexedDataset, chosen: str | None = None) -> Path:
    """Return the folder of a dataset's indexes: `chosen` (data.index_dir) if set, else PREFIX.index."""
    return Path(chosen) if chosen else dataset.prefix.with_name(f"{dataset.prefix.name}.index")


def _index_facts(dataset: IndexedDataset) -> dict[str, Any]:
    """Return a dict with the .idx's modification time and the dataset's dtype and number of sequences, documents and
    tokens.
    """
    return {
        "idx_mtime_ns": dataset.idx_mtime_ns,
        "num_sequences": dataset.num_sequences,
        "num_documents": dataset.num_documents,
        "num_tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
    }


def _in_range(index: Index, count: int, num_tokens: int) -> bool:
    """Return True if a cached index of first tokens is valid: it has `count` ascending entries between 0 and
    num_tokens.
    """
    starts, facts = index.arrays["every"], index.facts
    has_keys = set(index.arrays) == {"every"} and type(facts["one_each"]) in (bool, int)
    return has_keys and len(starts) == count and is_ascending(starts) and all_within(starts, 0, num_tokens)


def _check_index(dataset: IndexedDataset, stride: int, sampled_starts: Int64s) -> dict[str, Any]:
    """Check every entry of the .idx on two threads, and store the first token of every stride-th document in
    `sampled_starts`. Return a dict to store with the cached index: `one_each` is True if every document is one
    sequence. Raise DataError at a wrong entry.
    """
    num = dataset.num_documents
    step = max(_CHUNK // stride, 1) * stride

    def check(first: int) -> int:
        """Check documents first to first + step - 1. Return 0 if an entry is wrong, 2 if each document is one sequence,
        else 1.
        """
        last = min(first + step, num)
        low, high = int(dataset.document_index[first]), int(dataset.document_index[last])
        rise = classify_bounds(dataset.document_index[first : last + 1])
        if rise == 0 or low < 0 or high > dataset.num_sequences:
            return 0
        sequences = dataset.document_index[first:last:stride].astype(np.int64)
        starts = sequence_starts(dataset.pointers, dataset.dtype.itemsize, dataset.num_tokens, sequences)
        sampled_starts[first // stride : first // stride + len(starts)] = starts
        parts = range(low, high, 2 * _CHUNK)
        return rise if all(_are_contiguous(dataset, i, min(i + parts.step, high)) for i in parts) else 0

    with ThreadPoolExecutor(2) as threads:
        order = min(threads.map(check, range(0, num, step)), default=0 if dataset.num_sequences else 2)
    if order == 0:
        dataset.check_index()  # raises with the offset of the damage
        raise DataError(f"{dataset_file(dataset.prefix, '.idx')} changed while it was read. Try again.")
    return {"one_each": order == 2}


def _are_contiguous(dataset: IndexedDataset, first: int, last: int) -> bool:
    """Return True if sequences first to last - 1 of a dataset are contiguous: each begins where the previous one ends.
    """
    itemsize, pointers = dataset.dtype.itemsize, dataset.pointers[first : last + 1]
    if last == dataset.num_sequences:
        pointers = np.append(pointers, np.int64(dataset.num_tokens * itemsize))
    return are_contiguous(dataset.lengths[first:last], pointers, itemsize)


def are_contiguous(lengths: NDArray[Any], pointers: NDArray[Any], itemsize: int) -> bool:
    """Return True if each length, in tokens of `itemsize` bytes, is the distance in bytes from its pointer to the next.
    `pointers` has one entry more than `lengths`.
    """
    if compiled_helpers.lib is None:
        return are_contiguous_twin(lengths, pointers, itemsize)
    return bool(compiled_helpers.lib.sequences_follow(lengths.view(np.uint8), pointers.view(np.uint8), itemsize))


def are_contiguous_twin(lengths: NDArray[Any], pointers: NDArray[Any], itemsize: int) -> bool:
    """Compute `are_contiguous` in numpy."""
    sizes = lengths.astype(np.int64) * itemsize
    return bool((sizes >= 0).all() and (np.diff(pointers) == sizes).all())


def classify_bounds(bounds: NDArray[Any]) -> int:
    """Return 0 if the bounds decrease anywhere, 2 if each is one more than the previous, else 1."""
    if compiled_helpers.lib is None:
        return classify_bounds_twin(bounds)
    return int(compiled_helpers.lib.bounds_rise(bounds.view(np.uint8)))


def classify_bounds_twin(bounds: NDArray[Any]) -> int:
    """Compute `classify_bounds` in numpy: return 0 if the entries of a document index decrease anywhere, 2 if each is
    one more than the previous, else 1.
    """
    lower, upper = bounds[:-1], bounds[1:]
    if not (upper >= lower).all():
        return 0
    return 2 if (upper == lower + 1).all() else 1
