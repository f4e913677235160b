"""Training gives the same bytes for the same texts, also in another process, and at most the requested pieces."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest

from lmtrain.errors import DataError, UsageError
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer, split_after_words
from lmtrain.tokenizer.train import train_bpe, train_wordpiece

TEXTS = [f"word{i % 7} and wörd {i % 11} walked wandering-ly home, talking to {i % 5} men. 你好Ω{i}" for i in range(60)]
_IN_ANOTHER_PROCESS = """
import hashlib
from tests.unit.tokenizer.test_train import TEXTS
from lmtrain.tokenizer.train import train_bpe, train_wordpiece
for made in (train_bpe(TEXTS, 330), train_wordpiece(iter(TEXTS), 150, True)):
    print(hashlib.sha256(made.to_bytes()).hexdigest())
"""


def digest(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.to_bytes()).hexdigest()


def test_another_process_learns_the_same() -> None:
    # A hash map of the library has another order in every process, so one process alone would prove nothing.
    here = [digest(train_bpe(TEXTS, 330)), digest(train_wordpiece(TEXTS, 150, lowercase=True))]
    for _ in range(2):
        output = subprocess.run([sys.executable, "-c", _IN_ANOTHER_PROCESS], capture_output=True, text=True, check=True)
        assert output.stdout.split() == here


def test_a_long_text_is_learned_from_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ["\n \n".join(TEXTS)]
    expected = [digest(train_bpe(whole, 330)), digest(train_wordpiece(whole, 150, lowercase=True))]
    monkeypatch.setattr("lmtrain.tokenizer.text_to_ids_and_back._PART_CHARS", 30)
    assert len([*split_after_words(whole[0])]) > 60
    assert [digest(train_bpe(whole, 330)), digest(train_wordpiece(whole, 150, lowercase=True))] == expected


def test_a_vocabulary_has_the_requested_size() -> None:
    assert train_bpe(TEXTS, 300).vocab_size == 300
    assert train_wordpiece(TEXTS, 90, lowercase=True).vocab_size == 90
    assert train_wordpiece(TEXTS, 20, lowercase=True).vocab_size <= 20


def test_learned_pieces_shorten_text() -> None:
    assert len(train_bpe(TEXTS, 400).encode(TEXTS[0])) < len(TEXTS[0].encode()) / 2


def test_the_pattern_decides_what_can_merge() -> None:
    digits = ["1234 " * 50]
    whole, thirds = train_bpe(digits, 300), train_bpe(digits, 300, "cl100k")
    assert len(whole.encode("1234")) == 1
    assert [thirds.piece(token) for token in thirds.encode("1234")] == ["123", "4"]
    single = train_bpe([*digits, "e\u0301 \u00e9"], 300, "qwen2")
    assert [single.piece(token) for token in single.encode("1234")] == ["1", "2", "3", "4"]
    assert single.encode("e\u0301") == single.encode("\u00e9")


def test_every_piece_of_wordpiece_is_in_use() -> None:
    tokenizer = train_wordpiece(TEXTS, 150, lowercase=True)
    assert tokenizer.special["unk"] not in tokenizer.encode("walked home talking to men")


def test_the_letters_that_are_seen_most_are_kept() -> None:
    """Four letters have room; the letters of a frequent word are seen more often than those of many rare words."""
    tokenizer = train_wordpiece(["ab " * 100, "cd ce cf dc de df ec ed ef fc fd fe"], 13, lowercase=True)
    assert tokenizer.special["unk"] not in tokenizer.encode("ab")


def test_too_small_vocabularies_and_texts_without_words_are_refused() -> None:
    with pytest.raises(UsageError, match="257 or more"):
        train_bpe(TEXTS, 256)
    with pytest.raises(UsageError, match="7 or more"):
        train_wordpiece(TEXTS, 6, lowercase=True)
    with pytest.raises(DataError, match="no word"):
        train_wordpiece(["", " "], 100, lowercase=True)
