"""The count models against a slow dictionary twin, and against the axioms of probability."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.errors import DataError
from lmtrain.eval import statistics
from lmtrain.eval.statistics import Unigram, WittenBellBigram

VOCAB, EOD = 7, 0
Ids = npt.NDArray[np.uint16]
ids = st.lists(st.integers(0, VOCAB - 1), max_size=60).map(lambda values: np.array(values, dtype=np.uint16))
filled = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60).map(lambda v: np.array(v, dtype=np.uint16))


def twin_unigram(train: list[int], word: int) -> float:
    counts = Counter(train)
    return (counts[word] + len(counts) / VOCAB) / (len(train) + len(counts))


def twin_bigram(train: list[int], context: int, word: int) -> float:
    after: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for first, second in pairwise(train):
        after[first][second] += 1
    counts = after[context]
    if not counts:
        return twin_unigram(train, word)
    kinds = len(counts)
    return (counts[word] + kinds * twin_unigram(train, word)) / (counts.total() + kinds)


@given(train=filled, document=ids)
def test_both_agree_with_the_slow_twin(train: Ids, document: Ids) -> None:
    words, text = [int(t) for t in train], [int(t) for t in document]
    alone = -sum(math.log(twin_unigram(words, w)) for w in text)
    paired = -sum(math.log(twin_bigram(words, c, w)) for c, w in zip([EOD, *text], text, strict=False))
    assert Unigram(train, VOCAB).nll(document) == pytest.approx(alone)
    assert WittenBellBigram(train, VOCAB, EOD).nll(document) == pytest.approx(paired)


@given(train=ids)
def test_probabilities_sum_to_one_after_every_context(train: Ids) -> None:
    bigram = WittenBellBigram(train, VOCAB, EOD)
    words = np.arange(VOCAB)
    assert bigram.unigram.probabilities.sum() == pytest.approx(1.0)
    assert bigram.unigram.probabilities.min() > 0
    for context in range(VOCAB):
        row = bigram.probabilities(np.full(VOCAB, context), words)
        assert row.sum() == pytest.approx(1.0)
        assert row.min() > 0


def test_a_corpus_longer_than_a_chunk_loses_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    train = np.random.default_rng(0).integers(0, VOCAB, 101).astype(np.uint16)
    whole = WittenBellBigram(train, VOCAB, EOD)
    for size in (1, 2, 50, 100, 101):
        monkeypatch.setattr(statistics, "CHUNK_TOKENS", size)
        pieces = WittenBellBigram(train, VOCAB, EOD)
        np.testing.assert_array_equal(pieces.unigram.probabilities, whole.unigram.probabilities)
        assert pieces.nll(train) == whole.nll(train)


def test_pair_keys_of_a_large_vocabulary_do_not_overflow() -> None:
    train = np.array([65_535, 65_534] * 10, dtype=np.uint16)
    bigram = WittenBellBigram(train, 65_536, EOD)
    assert bigram.probabilities(np.array([65_535]), np.array([65_534]))[0] > 0.9


def test_a_regular_text_is_cheaper_in_pairs_than_alone() -> None:
    train = np.tile(np.array([1, 2, 3, 4], dtype=np.uint16), 200)
    text = train[:40]
    assert WittenBellBigram(train, VOCAB, EOD).nll(text) < Unigram(train, VOCAB).nll(text) / 10


def test_an_empty_document_costs_nothing() -> None:
    nothing = np.zeros(0, dtype=np.uint16)
    train = np.array([1, 2, 1], dtype=np.uint16)
    assert Unigram(train, VOCAB).nll(nothing) == 0
    assert WittenBellBigram(train, VOCAB, EOD).nll(nothing) == 0


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(DataError, match="0 to 6"):
        Unigram(np.array([7]), VOCAB)
    with pytest.raises(DataError, match="-1"):
        Unigram(np.array([1]), VOCAB).nll(np.array([-1]))


def test_the_nats_of_fifty_thousand_tokens_are_summed_in_float64() -> None:
    tokens = np.random.default_rng(6).integers(0, VOCAB, 50_000, dtype=np.uint16)
    bigram = WittenBellBigram(tokens, VOCAB, EOD)
    each = -np.log(bigram.probabilities(np.concatenate(([EOD], tokens[:-1])), tokens))
    assert bigram.nll(tokens) == pytest.approx(math.fsum(each.tolist()), rel=1e-12)
    alone = -np.log(bigram.unigram.probabilities[tokens])
    assert bigram.unigram.nll(tokens) == pytest.approx(math.fsum(alone.tolist()), rel=1e-12)
