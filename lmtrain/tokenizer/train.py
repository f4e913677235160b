"""Trains a vocabulary on texts. Called by `lmtrain tokenizer train` and by tests; equal texts give equal bytes.

The `tokenizers` library does the merging itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

import tokenizers
from tokenizers import models, trainers

from lmtrain.errors import DataError, UsageError, leave_out, own, way
from lmtrain.tokenizer import vocabulary_files
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer, split_after_words

_MIN_FREQUENCY = 2  # because: a pair that occurs once is not a pattern
_MOST_PIECES = 10_000_000  # because: the library reserves memory for all of them; ten times the largest published
_MAX_ALPHABET = 1000  # single characters in a WordPiece vocabulary; rarer characters become [UNK]


def check_vocab_size(vocab_size: int, kind: Literal["bpe", "wordpiece"], option: str = "--vocab-size") -> None:
    """Raise UsageError if a tokenizer of this kind cannot have `vocab_size` pieces: too few, or more than can be
    learned. `option` is the option or setting with which the user chose it, for the message.
    """
    smallest = len(vocabulary_files.ALPHABET) + 1 if kind == "bpe" else len(vocabulary_files.SPECIAL) + 2
    if vocab_size < smallest:
        name = "a byte-level BPE" if kind == "bpe" else "WordPiece"
        raise UsageError(f"{option}={vocab_size} is too small for {name}. Use {own(smallest)} or more.")
    if vocab_size > _MOST_PIECES:
        raise UsageError(f"{option}={vocab_size} is too large for a tokenizer. Use {own(_MOST_PIECES)} or less.")


def check_training(
    kind: Literal["bpe", "wordpiece"], pattern: str | None, lowercase: bool, vocab_size: int | None
) -> None:
    """Raise UsageError if options of `lmtrain tokenizer train` contradict each other, or if the size of the vocabulary
    is not possible; None is a size that is not known yet.
    """
    if lowercase and kind == "bpe":
        raise UsageError(
            "--lowercase works only with --kind wordpiece: byte-level BPE keeps the case of the text. "
            f"Use {way('--kind', 'wordpiece')}, or {leave_out('--lowercase', shown='leave it out')}."
        )
    if pattern is not None and kind != "bpe":
        way_out = f"{leave_out('--pattern')}."
        raise UsageError(f"--pattern works only with --kind bpe: WordPiece splits text as BERT does. {way_out}")
    if vocab_size is not None:
        check_vocab_size(vocab_size, kind)


def train_bpe(texts: Iterable[str], vocab_size: int, pattern: vocabulary_files.Pattern = "gpt2") -> Tokenizer:
    """Train a byte-level BPE tokenizer on the texts. It has at most `vocab_size` pieces, fewer for a small corpus;
    `pattern` decides how text is split into words: as by GPT-2, by GPT-4 and LLaMA 3 ("cl100k"), or by Qwen, which also
    joins letters and their accents (NFC). Raise UsageError if `vocab_size` is below 257.
    """
    check_vocab_size(vocab_size, "bpe")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = vocabulary_files.build_bpe_pre_tokenizer(pattern)
    if pattern == "qwen2":
        inner.normalizer = tokenizers.normalizers.NFC()
    inner.train_from_iterator(
        _short_parts(texts),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=_MIN_FREQUENCY,
            special_tokens=[vocabulary_files.EOD],
            initial_alphabet=sorted(vocabulary_files.ALPHABET),
            show_progress=False,
        ),
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(inner)


def train_wordpiece(texts: Iterable[str], vocab_size: int, lowercase: bool) -> Tokenizer:
    """Train a WordPiece tokenizer like BERT's on the texts. With `lowercase`, it lower-cases all text and removes
    accents. The texts are read twice, so an iterator is first collected in memory.
    """
    if isinstance(texts, Iterator):
        texts = list(texts)
    check_vocab_size(vocab_size, "wordpiece")
    num_learned = vocab_size - len(vocabulary_files.SPECIAL)
    inner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106 - no password
    vocabulary_files.apply_wordpiece_splitting(inner, lowercase)
    alphabet, inside_letters = _choose_alphabet(texts, inner, min(_MAX_ALPHABET, num_learned // 2))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_FREQUENCY,
        # because: the library numbers pieces like ##e in the order of a hash map, which differs between processes, and
        # breaks ties by these numbers; as special tokens they are numbered in the order of this list.
        special_tokens=[*vocabulary_files.SPECIAL, *(f"##{letter}" for letter in inside_letters)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    inner.train_from_iterator(_short_parts(texts), trainer)
    return Tokenizer(vocabulary_files.build_wordpiece(inner.get_vocab(with_added_tokens=False), lowercase))


def _short_parts(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, long ones in parts that end with a word, which gives the same tokenizer.

    because: the library's memory grows to fifty times the longest text
    """
    return (part for text in texts for part in split_after_words(text))


def _choose_alphabet(texts: Iterable[str], inner: tokenizers.Tokenizer, limit: int) -> tuple[list[str], list[str]]:
    """Return two lists: the most frequent characters of the texts, at most `limit`, and those of them that occur inside
    words (not only as the first character). `inner` normalizes the texts and splits them into words.
    """
    words: Counter[str] = Counter()
    for text in _short_parts(texts):
        words.update(word for word, _ in inner.pre_tokenizer.pre_tokenize_str(inner.normalizer.normalize_str(text)))
    letters: Counter[str] = Counter()
    for word, count in words.items():
        for letter in word:
            letters[letter] += count
    if not letters:
        raise DataError("The texts hold no word, so no tokenizer can be trained. Give files with text.")
    alphabet = sorted(sorted(letters, key=lambda letter: (-letters[letter], letter))[:limit])
    inside = {letter for word in words for letter in word[1:]}
    return alphabet, [letter for letter in alphabet if letter in inside]
