"""Hashes words to 64 bits, and runs of words to one hash each. Called by every module that compares texts.

Punctuation, white space and case are ignored. In scripts without spaces between words (Han, Kana, Thai, Lao, Khmer,
Burmese) each character is a word, so that runs of words are meaningful there too. The hashes are the same on every
machine and in every process.
"""

from __future__ import annotations

import hashlib
import re

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
# because: multiplication by an odd number is a bijection modulo 2^64, so that no bit of a word is lost
ODD = np.uint64(0x9E3779B97F4A7C15)
_CACHED_WORDS = 1 << 18  # because: this many common words cover nearly all of a text; 40 MB a process


class _WordHashes(dict[str, int]):
    """Cache of the hashes of the first words seen; the cache never changes a result."""

    def __missing__(self, word: str) -> int:
        value = int.from_bytes(hashlib.blake2b(word.encode(errors="replace"), digest_size=8).digest(), "little")
        if len(self) < _CACHED_WORDS:
            self[word] = value
        return value


_hash_of = _WordHashes().__getitem__


def split_words(text: str) -> list[str]:
    """Return a text's words in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def hash_words(words: list[str]) -> Hashes:
    """Return the hash of each word, in order."""
    return np.fromiter(map(_hash_of, words), np.uint64, len(words))


def hash_runs(hashes: Hashes, length: int) -> Hashes:
    """Return the hash of every sequence of `length` consecutive words, in order. `hashes` are the hashes of the single
    words; the result is empty if there are fewer than `length`.
    """
    mixed = np.zeros(max(hashes.size - length + 1, 0), dtype=np.uint64)
    for offset in range(length):  # a polynomial in ODD, so that the order of the words matters
        mixed = mixed * ODD + hashes[offset : offset + mixed.size]
    return mixed


def shingles(text: str, words: int) -> Hashes:
    """Return the sorted distinct hashes of all runs of `words` words in a text; a shorter text is a single run."""
    hashes = hash_words(split_words(text))
    return np.unique(hash_runs(hashes, min(words, hashes.size))) if hashes.size else hashes


def mix(values: Hashes) -> Hashes:
    """Scramble 64-bit numbers by splitmix64's last step: different inputs give different outputs, and the bits of the
    output look random.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
