"""Megatron-LM's samples in Megatron-LM's order, number for number, to continue its runs. Torch-free.

Used if `data.order=megatron`. Sequences take the role of documents and are shuffled by numpy's legacy generator; the
samples are cut from this text, repeated over the epochs, and shuffled again. The result depends on how many samples the
run requests. The three indexes correspond to Megatron-LM's document_index.npy, sample_index.npy and shuffle_index.npy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import Batch
from lmtrain.data.sample_dataset_interface import Counts, Int64s
from lmtrain.data.samples.causal_language_samples import (
    ID_LIMIT,
    build_batch,
    check_ids,
    expand_runs,
    read_runs,
    require_samples,
)
from lmtrain.data.store.document_boundaries import DocumentMap, index_identity
from lmtrain.data.store.index_cache import Index, IndexBuild, IndexCache, all_within, cache_if, is_ascending
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.errors import DataError, way
from lmtrain.runtime import compiled_helpers

SURPLUS = 0.005  # because: Megatron-LM's default; a blend requests this much more than each dataset's share
_CHUNK = 1 << 20
_CACHED_FROM = 1 << 20  # sequences in all epochs
_OWN_ORDER = way("data.order=own", instead_of="data.megatron_samples")


def split_sequences(num_sequences: int, ratios: Sequence[float]) -> list[range]:
    """Return the consecutive ranges of sequences for training, validation and test, sized in proportion to `ratios` and
    with bounds rounded half to even, as Megatron-LM splits a dataset.
    """
    shares = [float(ratio) for ratio in ratios] + [0.0] * (3 - len(ratios))
    ends = accumulate((share / sum(shares) for share in shares), initial=0.0)
    return [range(round(low * num_sequences), round(high * num_sequences)) for low, high in pairwise(ends)]


@dataclass(frozen=True)
class Epochs:
    """Number of epochs over the sequences, and whether the last epoch is shuffled separately from the others."""

    num_epochs: int
    tokens: int  # tokens of one epoch
    seq_len: int

    @classmethod
    def of(cls, tokens: int, num_samples: int, seq_len: int) -> Epochs:
        """Return the fewest epochs, of `tokens` tokens each, that give num_samples samples."""
        return cls(max(-(-(num_samples * seq_len + 1) // tokens), 1), tokens, seq_len)

    @property
    def num_samples(self) -> int:
        return (self.num_epochs * self.tokens - 1) // self.seq_len

    @property
    def before_last(self) -> int:
        """Number of samples in all epochs but the last."""
        return ((self.num_epochs - 1) * self.tokens - 1) // self.seq_len

    def shuffles_last_apart(self, num_samples: int) -> bool:
        """Return True if the last epoch is shuffled on its own: if a run needs under 80% of its samples."""
        limit = int(0.80 * ((self.tokens - 1) // self.seq_len))
        return self.num_epochs > 1 and num_samples - self.before_last < limit


def build_index(
    build: IndexBuild, lengths: NDArray[Any], sequences: range, epochs: Epochs, num_samples: int, seed: int
) -> dict[str, Any]:
    """Build Megatron-LM's document, sample and shuffle index as arrays of `build`, with random draws in Megatron-LM's
    order. `lengths` is the number of tokens per sequence. Return a dict to store with the index: the number of epochs,
    and whether the last epoch is shuffled separately.
    """
    last_apart, random = epochs.shuffles_last_apart(num_samples), np.random.RandomState(seed)
    documents = build.create("document_index", "<i4", epochs.num_epochs * len(sequences))
    for epoch in range(epochs.num_epochs):
        part = documents[epoch * len(sequences) : (epoch + 1) * len(sequences)]
        part[:] = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    last = (epochs.num_epochs - 1) * len(sequences) if last_apart else len(documents)
    for part in (documents[:last], documents[last:]) if last_apart else (documents,):
        random.shuffle(part)

    total = epochs.num_samples
    wide = max(len(documents), int(lengths[sequences.start : sequences.stop].max())) > 2**31 - 1
    samples = build.create("sample_index", "<i8" if wide else "<i4", 2 * (total + 1)).reshape(-1, 2)
    _fill_sample_index(samples, documents, lengths, epochs.seq_len)

    shuffled = build.create("shuffle_index", "<i8" if total >= 2**32 - 2 else "<u4", total)
    for first in range(0, total, _CHUNK):
        shuffled[first : first + _CHUNK] = np.arange(first, min(first + _CHUNK, total))
    split = epochs.before_last if last_apart else total
    for part in (shuffled[:split], shuffled[split:]) if last_apart else (shuffled,):
        random.shuffle(part)
    return {"num_epochs": epochs.num_epochs, "last_apart": last_apart}


def _fill_sample_index(
    sample_index: NDArray[Any], document_index: NDArray[np.int32], lengths: NDArray[Any], seq_len: int
) -> None:
    """Fill row k of `sample_index` with the position of token k * seq_len of the text: (index into `document_index`,
    offset within that sequence). `lengths` is the number of tokens per sequence; row 0 stays (0, 0).
    """
    before, row = 0, 1
    for first in range(0, len(document_index), _CHUNK):
        ends = before + np.cumsum(lengths[document_index[first : first + _CHUNK]], dtype=np.int64)
        # end of the rows whose token is before this chunk's end
        stop = min(-(-int(ends[-1]) // seq_len), len(sample_index))
        tokens = np.arange(row, stop) * seq_len
        places = np.searchsorted(ends, tokens, side="right")
        sample_index[row:stop, 0] = first + places
        sample_index[row:stop, 1] = tokens - np.where(places > 0, ends[places - 1], before)
        before, row = int(ends[-1]), max(stop, row)


def _in_range(index: Index, lengths: NDArray[Any], sequences: range) -> bool:
    """Return True if every entry of a cached document, sample and shuffle index points to an existing sequence, token
    or sample. `lengths` is the number of tokens per sequence.
    """
    documents, shuffled = index.arrays["document_index"], index.arrays["shuffle_index"]
    places, offsets = index.arrays["sample_index"].reshape(-1, 2).T
    parts = (slice(i, i + _CHUNK) for i in range(0, len(places), _CHUNK))
    return (
        len(places) == len(shuffled) + 1
        and all_within(documents, sequences.start, sequences.stop - 1)
        and all_within(shuffled, 0, len(shuffled) - 1)
        and all_within(places, 0, len(documents) - 1)
        and is_ascending(places)
        and all_within(offsets, 0, 2**31 - 1)
        and all(bool((offsets[part] <= lengths[documents[places[part]]]).all()) for part in parts)
    )


class MegatronDataset:
    """Dataset in Megatron-LM's order: sample k is the k-th sample of its run, so samples are read as 0, 1, 2, ..."""

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: range,
        seq_len: int,
        num_samples: int | None,
        seed: int,
        document_mask: bool = False,
        vocab_size: int = ID_LIMIT,
        cache: IndexCache | None = None,
    ) -> None:
        DocumentMap.of(indexed, cache)  # to check every entry of the .idx
        self.prefix, self.seq_len, self.document_mask = indexed.prefix, seq_len, document_mask
        self.indexed, self._vocab_size = indexed, vocab_size
        tokens = indexed.count_tokens(sequences)
        if num_samples is None:  # take one epoch
            num_samples = (tokens - 1) // seq_len
        require_samples(indexed, sequences, seq_len, num_samples, tokens)
        epochs = Epochs.of(tokens, num_samples, seq_len)
        if indexed.num_sequences > 2**31 - 1:
            raise DataError(
                f"{indexed.prefix} has {indexed.num_sequences} sequences, but Megatron-LM's order allows "
                f"{2**31 - 1}. Use {_OWN_ORDER}."
            )
        inputs = {
            "sequences": [sequences.start, sequences.stop], "seq_len": seq_len,
            "num_samples": num_samples, "seed": seed,
        }  # fmt: skip
        index = cache_if(epochs.num_epochs * len(sequences) >= _CACHED_FROM, cache).get(
            "megatron", lambda: index_identity(indexed) | inputs,
            lambda build: build_index(build, indexed.lengths, sequences, epochs, num_samples, seed),
            lambda index: _in_range(index, indexed.lengths, sequences),
        )  # fmt: skip
        self.document_index, self.shuffle_index = index.arrays["document_index"], index.arrays["shuffle_index"]
        self.sample_index = index.arrays["sample_index"].reshape(-1, 2)

    @property
    def num_samples(self) -> int:
        return len(self.shuffle_index)

    def counts(self, sample_ids: Int64s) -> Counts:
        tokens = len(sample_ids) * self.seq_len
        unlabelled = len(self._document_starts(*self._token_runs(sample_ids)[::2])[0]) if self.document_mask else 0
        return Counts(tokens - unlabelled, tokens)

    def batch(self, sample_ids: Int64s) -> Batch:
        rows, starts, sizes = self._token_runs(sample_ids)
        tokens, places = self.indexed.gather(starts, sizes)
        tokens_BT, labels_BT, ids_valid = read_runs(
            tokens, places, sizes, len(sample_ids), self.seq_len, self._vocab_size
        )
        self.indexed.check(starts, sizes)
        if not ids_valid:
            check_ids(np.stack([tokens_BT, labels_BT]), self._vocab_size, self.prefix)
        return build_batch(tokens_BT, labels_BT, self._document_starts(rows, sizes) if self.document_mask else None)

    def _token_runs(self, sample_ids: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return the token runs that these samples consist of, in order, as three arrays: row in the batch, first token
        in the .bin, number of tokens.
        """
        indices = self.shuffle_index[sample_ids].astype(np.int64)
        (first, first_offset), (last, last_offset) = (self.sample_index[indices + i].astype(np.int64).T for i in (0, 1))
        rows, places = expand_runs(first, last - first + 1)
        sequences = self.document_index[places]
        starts = self.indexed.pointers[sequences] // self.indexed.dtype.itemsize
        ends = starts + np.where(places == last[rows], last_offset[rows] + 1, self.indexed.lengths[sequences])
        starts = starts + np.where(places == first[rows], first_offset[rows], 0)
        return rows, starts, ends - starts

    def _document_starts(self, rows: Int64s, sizes: Int64s) -> tuple[Int64s, Int64s]:
        """Return (rows, columns) of the tokens in a batch that begin a token run, and so a document, except in column
        0. `rows` and `sizes` are the row and the number of tokens of each run.
        """
        columns = np.cumsum(sizes) - sizes - rows * (self.seq_len + 1)
        new = (columns > 0) & (sizes > 0)
        return rows[new], columns[new]


@dataclass(frozen=True)
class SequentialOrder:
    """Sample order in which position k takes sample k. Raises DataError beyond the last sample."""

    num_samples: int

    def ids(self, first: int, count: int) -> Int64s:
        _require_samples(first + count, self.num_samples, "order")
        return np.arange(first, first + count)


class MegatronBlendOrder:
    """Megatron-LM's blend order, computed position by position over the whole run."""

    def __init__(self, weights: Sequence[float], sizes: Sequence[int], num_samples: int) -> None:
        self.num_samples = num_samples
        self._datasets, self._samples = blend_index(weights, num_samples)
        self._offsets = np.cumsum([0, *sizes], dtype=np.int64)
        counts = np.bincount(self._datasets, minlength=len(sizes))
        short = np.flatnonzero(counts > np.array(sizes))
        if len(short):
            d = int(short[0])
            raise DataError(
                f"Megatron-LM's blend takes {counts[d]} samples of dataset {d + 1}, which has only {sizes[d]}. "
                f"Use {_OWN_ORDER}."
            )

    def ids(self, first: int, count: int) -> Int64s:
        _require_samples(first + count, self.num_samples, "blend")
        part = slice(first, first + count)
        return self._offsets[self._datasets[part]] + self._samples[part]

    def samples_before(self, position: int) -> list[int]:
        """Return how many samples of each dataset come before this position."""
        return list(map(int, np.bincount(self._datasets[:position], minlength=len(self._offsets) - 1)))


def _require_samples(requested: int, num_samples: int, order: str) -> None:
    """Raise DataError if a run requests more samples (`requested`) than Megatron-LM's order has (`num_samples`).
    `order` is a name for this order in the message.
    """
    if requested > num_samples:
        raise DataError(
            f"Sample {requested} was requested, but Megatron-LM's {order} ends after {num_samples}. "
            "Give data.megatron_samples, the number of samples of its whole run."
        )


def blend_sizes(weights: Sequence[float], num_samples: int) -> tuple[list[int], list[int]]:
    """Return the samples that each dataset gives to a blend, and those that are built for it (more by SURPLUS)."""
    counts = [math.ceil(num_samples * weight) for weight in _normalize(weights).tolist()]
    return counts, [math.ceil(count * (1 + SURPLUS)) for count in counts]


def blend_index(weights: Sequence[float], num_positions: int) -> tuple[NDArray[np.int16], Int64s]:
    """Return (dataset number, number of the sample within the dataset) of the first `num_positions` positions of a
    blend.

    The next dataset is always the one that is furthest behind its share; ties go to the first dataset.
    """
    normalized = _normalize(_normalize(weights))  # because: Megatron-LM does so twice, which can change the last bit
    return compiled_helpers.compiled("megatron_blend", blend_index_twin)(normalized, num_positions)


def _normalize(weights: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights divided by their sum."""
    array = np.array(weights, np.float64)
    return array / np.sum(array)


def blend_index_twin(weights: NDArray[np.float64], num_positions: int) -> tuple[NDArray[np.int16], Int64s]:
    """Compute `blend_index` in numpy: return two arrays for the first `num_positions` positions of a blend, the dataset
    number and the number of the sample within the dataset. The sum of `weights` is 1.
    """
    counts = np.zeros(len(weights), np.int64)
    datasets, samples = np.empty(num_positions, np.int16), np.empty(num_positions, np.int64)
    for i in range(num_positions):
        d = int(np.argmax(weights * max(i, 1) - counts))
        datasets[i], samples[i] = d, counts[d]
        counts[d] += 1
    return datasets, samples
