"""The same targets scored by counting: what a trained model must beat, beside its own numbers. Torch-free.

Called by `lmtrain eval --baseline`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmtrain.errors import DataError
from lmtrain.eval.recipes.documents import open_dataset
from lmtrain.eval.task import BaselineResult, Prepared, Result, bits_per_byte, perplexity
from lmtrain.tokenizer.base import Tokenizer

CHUNK_TOKENS = 1 << 24  # because: 128 MiB of pair keys at a time, so that a memory-mapped corpus is never held whole

Tokens = npt.NDArray[np.integer[Any]]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Unigram:
    """P(w): how often each token occurs, with a little kept for tokens never seen."""

    def __init__(self, train_tokens: Tokens, vocab_size: int) -> None:
        counts = np.zeros(vocab_size, dtype=np.int64)
        for chunk in _chunks(train_tokens, vocab_size, overlap=0):
            counts += np.bincount(chunk, minlength=vocab_size)
        num_kinds = max(int(np.count_nonzero(counts)), 1)  # an empty corpus leaves the uniform distribution
        self.vocab_size = vocab_size
        self.probabilities: Floats = (counts + num_kinds / vocab_size) / (counts.sum() + num_kinds)

    def nll(self, tokens: Tokens) -> float:
        """Nats to write down one document's tokens, each by itself."""
        return float(-np.log(self.probabilities[_checked(tokens, self.vocab_size)]).sum())


class WittenBellBigram:
    """P(w | c): the counts of pairs, interpolated with the unigram by the variety of what followed c."""

    def __init__(self, train_tokens: Tokens, vocab_size: int, eod_id: int) -> None:
        self.vocab_size, self.eod_id = vocab_size, eod_id
        self.unigram = Unigram(train_tokens, vocab_size)
        self._pairs, self._counts = _count_pairs(train_tokens, vocab_size)  # pair (c, w) has the key c * V + w
        contexts = self._pairs // vocab_size
        self._kinds_after = np.bincount(contexts, minlength=vocab_size)
        self._tokens_after: Ints = np.zeros(vocab_size, dtype=np.int64)
        np.add.at(self._tokens_after, contexts, self._counts)  # bincount's weights would round beyond 2^53

    def probabilities(self, contexts: Tokens, tokens: Tokens) -> Floats:
        """P(token | context), element by element."""
        before, after = _checked(contexts, self.vocab_size), _checked(tokens, self.vocab_size)
        seen = self._tokens_after[before] > 0
        kept = np.where(seen, self._kinds_after[before], 1)
        return (self._count(before, after) + kept * self.unigram.probabilities[after]) / (
            self._tokens_after[before] + kept
        )

    def nll(self, tokens: Tokens) -> float:
        """Nats to write down one document's tokens, the first of them after an end-of-document token."""
        ids = _checked(tokens, self.vocab_size)
        return float(-np.log(self.probabilities(np.concatenate(([self.eod_id], ids))[:-1], ids)).sum())

    def _count(self, before: Ints, after: Ints) -> Ints:
        if self._pairs.size == 0:
            return np.zeros(before.shape, dtype=np.int64)
        keys = before * self.vocab_size + after
        places = np.minimum(np.searchsorted(self._pairs, keys), self._pairs.size - 1)
        return np.where(self._pairs[places] == keys, self._counts[places], 0)


def _count_pairs(tokens: Tokens, vocab_size: int) -> tuple[Ints, Ints]:
    """The sorted keys of all neighbouring pairs and how often each occurs, a chunk at a time."""
    keys: Ints = np.zeros(0, dtype=np.int64)
    counts: Ints = np.zeros(0, dtype=np.int64)
    for chunk in _chunks(tokens, vocab_size, overlap=1):
        new_keys, new_counts = np.unique(chunk[:-1] * vocab_size + chunk[1:], return_counts=True)
        merged, where = np.unique(np.concatenate((keys, new_keys)), return_inverse=True)
        total = np.zeros(merged.size, dtype=np.int64)
        np.add.at(total, where, np.concatenate((counts, new_counts)))
        keys, counts = merged, total
    return keys, counts


def _chunks(tokens: Tokens, vocab_size: int, overlap: int) -> Iterator[Ints]:
    for start in range(0, len(tokens), CHUNK_TOKENS):
        yield _checked(tokens[start : start + CHUNK_TOKENS + overlap], vocab_size)


def _checked(tokens: Tokens, vocab_size: int) -> Ints:
    ids = np.asarray(tokens, dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise DataError(
            f"Token ids run from {ids.min()} to {ids.max()}, but this vocabulary holds 0 to {vocab_size - 1}. "
            "Count and score tokens of the same tokenizer."
        )
    return ids


def with_baselines(result: Result, prepared: Prepared, train: Path, tokenizer: Tokenizer) -> Result:
    """Counts the training dataset's tokens and adds a unigram's and a bigram's numbers to the result."""
    if tokenizer.eod_id is None or prepared.documents is None:
        raise DataError(f"{result.protocol} has no baselines, which need whole documents. Leave --baseline out.")
    indexed = open_dataset(train, tokenizer)
    bigram = WittenBellBigram(indexed.tokens, tokenizer.vocab_size, tokenizer.eod_id)
    rows = tuple(
        _row(name, result, prepared, baseline)
        for name, baseline in (("unigram", bigram.unigram), ("bigram (Witten-Bell)", bigram))
    )
    counted: dict[str, str | int] = {"baselines_counted_on": str(train), "baselines_train_tokens": indexed.num_tokens}
    return dataclasses.replace(result, baselines=rows, notes=result.notes | counted)


def _row(name: str, result: Result, prepared: Prepared, baseline: Unigram | WittenBellBigram) -> BaselineResult:
    assert prepared.documents is not None
    nll = sum(baseline.nll(tokens[1:]) for tokens in prepared.documents)  # the first token is the prefix
    bits = bits_per_byte(nll, float(prepared.known["bytes"].sum()))
    per_token = perplexity(nll, prepared.num_targets)
    return BaselineResult(
        name=name,
        nll_sum_nats=nll,
        bits_per_byte=bits,
        token_perplexity=per_token,
        model_bits_ratio=result.measures["bits_per_byte"] / bits,
        model_token_perplexity_ratio=result.measures["token_perplexity"] / per_token,
    )
