"""Words and runs of words as hashes: what is ignored, what counts, and that a hash never changes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_tools.corpus.flow.word_ngram_hashes import hash_runs, hash_words, mix, shingles, split_words


def test_case_and_punctuation_are_ignored() -> None:
    assert split_words("Don't stop, PLEASE!") == ["don", "t", "stop", "please"]


def test_scripts_without_spaces_give_a_word_a_character() -> None:
    assert split_words("GPT是模型 ภาษา") == ["gpt", "是", "模", "型", "ภ", "า", "ษ", "า"]


def test_hashes_are_the_same_for_ever() -> None:
    assert [hex(value) for value in hash_words(["the", "cat"])] == ["0x2e3a97906cabda5e", "0x2f989d7b2cdd2733"]
    assert hex(mix(np.array([1], np.uint64))[0]) == "0x5692161d100b05e5"


@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=30), st.integers(1, 6))
def test_runs_are_equal_where_their_words_are(words: list[str], length: int) -> None:
    hashes = hash_runs(hash_words(words), length)
    runs = [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]
    assert hashes.size == len(runs)
    assert len(set(hashes.tolist())) == len(set(runs))
    assert len(set(zip(runs, hashes.tolist(), strict=True))) == len(set(runs))


def test_a_short_text_is_one_shingle_and_an_empty_one_none() -> None:
    assert shingles("one two", 5).size == 1
    assert shingles(" ,.", 5).size == 0
    assert shingles("a a a a a a a a", 5).size == 1
