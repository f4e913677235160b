"""Decides which sentences form a sample: documents are cut into sentence runs of about a target length. Torch-free.

Called by masked_language_samples.py. The result is a map, an array [num_samples, 3] of (first sentence, one past the
last, target). A sample's tokens are later cut to its target, which is `max_tokens` or, with the probability
`short_share`, any smaller number from 2. A sample ends when it has its target and `min_sentences` and two or more
sentences remain, or at the document's end.

`build_map` is lmtrain's own: one pass over the documents, in their order; the target is drawn from the stream of the
sample's first sentence, so that a document's samples depend on nothing else. `build_megatron_map` equals Megatron-LM's
map bit for bit, to continue its runs: all epochs of the run in one map, drawn from one generator and shuffled.
csrc/sentence_pairs.cpp implements both; the twins in this file give equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.data.sample_dataset_interface import GOLDEN, mix
from lmtrain.runtime import compiled_helpers

Ints = NDArray[Any]
Row = tuple[int, int, int]
_LONGEST_SENTENCE = 512  # because: Megatron-LM skips documents with a longer sentence
_MANY_EPOCHS = 2**31 - 2  # Megatron-LM's value for "as many epochs as needed"
_ALL_SAMPLES = 2**62


def stream_key(seed: int, number: int) -> int:
    """Return the 64-bit key of random stream `number`; `draw_at` and `Draws` generate numbers from it."""
    return mix(mix(seed) + number * GOLDEN)


def draw_at(key: int, i: int) -> int:
    """Return draw i of the random stream with this key: 64 random bits."""
    return mix(key + (i + 1) * GOLDEN)


class Draws:
    """The draws of one random stream, in order."""

    def __init__(self, key: int) -> None:
        self._key, self._i = key, 0

    def next(self) -> int:
        """Return the next 64 random bits."""
        self._i += 1
        return draw_at(self._key, self._i - 1)

    def below(self, n: int) -> int:
        """Return a random integer in 0..n-1, for n up to 2**32."""
        return ((self.next() >> 32) * n) >> 32

    def count_ones(self, bits: int) -> int:
        """Return how many of the next `bits` random bits of the stream are 1. Unused bits of a 64-bit draw are
        discarded.
        """
        ones = 0
        while bits > 0:
            ones += (self.next() & ((1 << min(bits, 64)) - 1)).bit_count()
            bits -= 64
        return ones


def build_map(
    lengths: Ints, bounds: Ints, *, max_tokens: int, short_share: float, min_sentences: int, seed: int
) -> Ints:
    """Return the samples that lmtrain cuts documents into, an array [samples, 3] of (first sentence, one past the last,
    target number of tokens). `lengths` are tokens per sentence; document d is sentences bounds[d] to bounds[d + 1] - 1.
    A target is `max_tokens` or, with the probability `short_share`, a smaller random number.
    """
    return compiled_helpers.compiled("build_map", build_map_twin)(
        *_to_index_dtypes(lengths, bounds), max_tokens, round(short_share * 2**32), min_sentences, seed
    )


def build_megatron_map(
    lengths: Ints,
    bounds: Ints,
    *,
    max_tokens: int,
    short_share: float,
    min_sentences: int,
    seed: int,
    num_samples: int | None = None,
) -> Ints:
    """Return the samples that Megatron-LM cuts documents into, an array [samples, 3] of (first sentence, one past the
    last, target number of tokens). `lengths` are tokens per sentence; document d is sentences bounds[d] to bounds[d +
    1] - 1. Whole epochs are added until there are `num_samples` samples (None: one epoch). A target is `max_tokens` or,
    with the probability `short_share`, a smaller random number.

    The other arguments are as in `build_map`.
    """
    ratio = int(1 / short_share + 0.5) if short_share > 0 else 0
    epochs, max_samples = (1, _ALL_SAMPLES) if num_samples is None else (_MANY_EPOCHS, num_samples)
    return compiled_helpers.compiled("build_megatron_map", build_megatron_map_twin)(
        *_to_index_dtypes(lengths, bounds), epochs, max_samples, max_tokens, ratio, min_sentences, seed
    )


def build_map_twin(
    lengths: Ints, bounds: Ints, max_tokens: int, short_threshold: int, min_sentences: int, seed: int
) -> Ints:
    """Compute `build_map` in Python: return an array [samples, 3] of (first sentence, one past the last, target number
    of tokens). `lengths` are tokens per sentence, `bounds` the first sentence of each document and the end;
    `short_threshold` is the share of targets below max_tokens, times 2**32.
    """
    def target_of(first: int) -> int:
        draws = Draws(stream_key(seed, first))
        return max_tokens if draws.next() >> 32 >= short_threshold else 2 + draws.below(max_tokens - 1)

    _check_arguments(lengths, bounds, max_tokens)
    documents = ((begin, end) for begin, end in pairwise(bounds.tolist()) if end - begin >= min_sentences)
    rows = [row for document in documents for row in _cut_document(lengths, *document, min_sentences, target_of)]
    return _to_map_array(rows, len(lengths))


def build_megatron_map_twin(
    lengths: Ints,
    bounds: Ints,
    num_epochs: int,
    max_samples: int,
    max_tokens: int,
    short_ratio: int,
    min_sentences: int,
    seed: int,
) -> Ints:
    """Compute `build_megatron_map` in Python: return an array [samples, 3] of (first sentence, one past the last,
    target number of tokens). Whole epochs, at most `num_epochs`, are added until there are `max_samples` samples. One
    target in `short_ratio` is drawn from 2 to max_tokens; if it is 0, all targets are max_tokens.
    """
    random = _mersenne_32(seed)

    def target_of(_: int) -> int:
        if short_ratio == 0:
            return max_tokens
        draw = next(random)
        return 2 + draw % (max_tokens - 1) if draw % short_ratio == 0 else max_tokens

    _check_arguments(lengths, bounds, max_tokens)
    documents = [d for d in pairwise(bounds.tolist()) if _megatron_uses_document(lengths, *d, min_sentences)]
    rows: list[Row] = []
    for _ in range(num_epochs if documents else 0):
        if len(rows) >= max_samples:
            break
        for begin, end in documents:
            rows.extend(_cut_document(lengths, begin, end, min_sentences, target_of))
    random_64 = _mersenne_64(seed + 1)
    for i in range(len(rows) - 1, 0, -1):
        j = next(random_64) % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return _to_map_array(rows, len(lengths))


def _cut_document(
    lengths: Ints, begin: int, end: int, min_sentences: int, target_of: Callable[[int], int]
) -> Iterator[Row]:
    """Yield the samples of the document with sentences begin to end - 1, as (first sentence, one past the last, target
    number of tokens). `lengths` are tokens per sentence; `target_of(i)` must return the target of a sample that begins
    at sentence i.
    """
    first, tokens, target = begin, 0, target_of(begin)
    for i, length in enumerate(lengths[begin:end].tolist(), begin):
        tokens += length
        count, remaining = i + 1 - first, end - i - 1
        if (tokens >= target and remaining > 1 and count >= min_sentences) or remaining == 0:
            yield first, i + 1, target
            first, tokens, target = i + 1, 0, target_of(i + 1)


def _megatron_uses_document(lengths: Ints, begin: int, end: int, min_sentences: int) -> bool:
    """Return True if Megatron-LM makes samples of the document with sentences begin to end - 1: it must have
    `min_sentences` sentences and, unless it has only one, none that is longer than 512 tokens.
    """
    if end - begin < max(min_sentences, 1):
        return False
    return end - begin == 1 or int(lengths[begin:end].max()) <= _LONGEST_SENTENCE


def _to_index_dtypes(lengths: Ints, bounds: Ints) -> tuple[Ints, Ints]:
    """Return both arrays in the dtypes of an .idx file; arrays that come from an .idx are not copied."""
    return np.ascontiguousarray(lengths, np.int32), np.ascontiguousarray(bounds, np.int64)


def _check_arguments(lengths: Ints, bounds: Ints, max_tokens: int) -> None:
    """Raise ValueError, as the compiled code does, if `max_tokens` is below 2 or `bounds` decrease or exceed the
    sentences.
    """
    if max_tokens < 2:
        raise ValueError("max_tokens must be at least 2")
    if len(bounds) and (bounds[0] < 0 or bounds[-1] > len(lengths) or (np.diff(bounds) < 0).any()):
        raise ValueError("the document bounds must rise and lie within the sentences")


def _to_map_array(rows: list[Row], num_sentences: int) -> Ints:
    """Return a map's rows as an array, in 64 bits if the sentence numbers need them, else in 32."""
    return np.array(rows, np.uint64 if num_sentences > 2**32 - 1 else np.uint32).reshape(-1, 3)


def _mersenne_32(seed: int) -> Iterator[int]:
    """Yield the 32-bit outputs of C++'s random generator std::mt19937 with this seed, without end."""
    random = np.random.RandomState(seed % 2**32)
    while True:
        yield from random.randint(0, 2**32, 1024, np.uint32).tolist()


def _mersenne_64(seed: int) -> Iterator[int]:
    """Yield the 64-bit outputs of C++'s random generator std::mt19937_64 with this seed, without end. numpy lacks it;
    the constants are Matsumoto and Nishimura's.
    """
    all_bits = 2**64 - 1
    state = [seed & all_bits]
    for i in range(1, 312):
        state.append((6364136223846793005 * (state[-1] ^ (state[-1] >> 62)) + i) & all_bits)
    while True:
        for i in range(312):
            word = (state[i] & 0xFFFFFFFF80000000) | (state[(i + 1) % 312] & 0x7FFFFFFF)
            state[i] = state[(i + 156) % 312] ^ (word >> 1) ^ (0xB5026F5AA96619E9 if word & 1 else 0)
        for x in state:
            x ^= (x >> 29) & 0x5555555555555555
            x ^= (x << 17) & 0x71D67FFFEDA60000
            x ^= (x << 37) & 0xFFF7EEE000000000
            yield x ^ (x >> 43)
