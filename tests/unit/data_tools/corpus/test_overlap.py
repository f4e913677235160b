"""The overlap of planted copies: exact, lightly edited, spread over two texts, and none at all."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.corpora.stdlib import NEAR_COPY, SHINGLE_WORDS, overlaps
from data_tools.corpus.flow.word_ngram_hashes import shingles


def prose(seed: int, num_words: int = 2000) -> list[str]:
    generator = random.Random(seed)
    return [f"word{generator.randrange(500)}" for _ in range(num_words)]


def edited(words: list[str], share: float, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [f"edit{i}" if generator.random() < share else word for i, word in enumerate(words)]


def compare(*texts: list[str]) -> float:
    """How much of the first text stands in the rest."""
    return overlaps([shingles(" ".join(words), SHINGLE_WORDS) for words in texts], [0])[0]


def test_an_exact_copy_is_found() -> None:
    assert compare(prose(1), prose(2), prose(1), prose(3)) == 1.0


def test_a_copy_with_every_tenth_word_changed_is_a_near_copy() -> None:
    original = prose(1, 20_000)
    found = compare(edited(original, 0.1, seed=9), prose(2), original)
    assert found == pytest.approx(0.9**SHINGLE_WORDS, abs=0.04)
    assert found > NEAR_COPY


def test_unrelated_texts_share_nothing() -> None:
    assert compare(prose(1), prose(2), prose(3)) == 0.0


def test_a_text_copied_from_two_others_is_found_anywhere() -> None:
    first, second = prose(1), prose(2)
    assert compare(first[:1000] + second[:1000], first) == pytest.approx(0.5, abs=0.01)
    assert compare(first[:1000] + second[:1000], first, second) == pytest.approx(1.0, abs=0.01)


def test_a_small_piece_inside_a_large_text_counts_whole() -> None:
    assert compare(prose(1)[100:300], prose(1)) == 1.0


def test_layout_case_and_punctuation_are_no_disguise() -> None:
    plain = "for key in sorted(table): print(key, table[key], sep='\\t', end='')"
    disguised = plain.upper().replace(" ", "\n    ").replace("'", '"')
    assert np.array_equal(shingles(plain, SHINGLE_WORDS), shingles(disguised, SHINGLE_WORDS))


def test_the_order_of_the_words_counts() -> None:
    words = prose(1, SHINGLE_WORDS)
    assert shingles(" ".join(words), SHINGLE_WORDS)[0] != shingles(" ".join(reversed(words)), SHINGLE_WORDS)[0]


@pytest.mark.parametrize(("text", "size"), [("", 0), (" \n.,", 0), ("one", 1), ("one two three", 1)])
def test_short_texts(text: str, size: int) -> None:
    assert shingles(text, SHINGLE_WORDS).size == size


def test_an_empty_text_overlaps_with_nothing() -> None:
    assert overlaps([shingles("", SHINGLE_WORDS), shingles("a b c", SHINGLE_WORDS)], [0]) == [0.0]


short = st.lists(st.lists(st.sampled_from("abc"), min_size=0, max_size=14), min_size=1, max_size=5)


@given(texts=short, words=st.integers(1, 4))
def test_agrees_with_sets_of_word_runs(texts: list[list[str]], words: int) -> None:
    def runs(text: list[str]) -> set[tuple[str, ...]]:
        size = min(words, len(text))
        return {tuple(text[i : i + size]) for i in range(len(text) - size + 1)} if size else set()

    found = overlaps([shingles(" ".join(text), words) for text in texts], range(len(texts)))
    sets = [runs(text) for text in texts]
    for i, overlap in enumerate(found):
        others = [s for j, s in enumerate(sets) if j != i]
        size = max(len(sets[i]), 1)
        assert overlap == len(sets[i] & set().union(*others)) / size
