"""Near-copies: how much of one text stands, word for word, in others. Plain numpy, exact, no sampling.

A text becomes the set of its shingles: every run of eight words, hashed to 64 bits. The containment of a text
in another is the share of its shingles that the other has too: 1 for a copy, about 0.4 when one word in ten
was changed (0.9^8), and near 0 for unrelated texts, which share a licence header or an idiom at most.
Called by the corpus builders to keep held-out files honest. It knows nothing of files, tokens or models.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SHINGLE_WORDS = 8
# because: over the standard library, 7 in 10 files share less than 0.05 with any one other file, and what they share is
# licence, imports and idiom. Above 0.2 stand the texts that were written by copying (bz2 and lzma, wave and aifc, the
# MIME types, the codecs). One word in six changed at random still leaves 0.23.
NEAR_COPY = 0.2

Hashes = npt.NDArray[np.uint64]
_WORD = re.compile(r"\w+")
# because: times an odd number is a bijection modulo 2^64, so that no bit of a word is lost
_ODD = np.uint64(0x9E3779B97F4A7C15)


def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def shingles(text: str, words: int = SHINGLE_WORDS) -> Hashes:
    """The sorted distinct hashes of every run of `words` words; a shorter text is one single shingle.

    Case and everything between words (spaces, indentation, punctuation) are ignored: they are what an edit of
    layout changes.
    """
    known: dict[str, int] = {}
    ids = [known[w] if w in known else known.setdefault(w, _word_hash(w)) for w in _WORD.findall(text.lower())]
    hashes = np.array(ids, dtype=np.uint64)
    words = min(words, hashes.size)
    if words == 0:
        return hashes
    mixed = np.zeros(hashes.size - words + 1, dtype=np.uint64)
    for offset in range(words):  # a polynomial in _ODD: the order of the words counts
        mixed = mixed * _ODD + hashes[offset : offset + mixed.size]
    return np.unique(mixed)


@dataclass(frozen=True)
class Overlap:
    """How much of one text stands in the others."""

    largest: float  # share of its shingles found in the one other text that holds most of them
    nearest: int  # which text that is; -1 when nothing is shared
    anywhere: float  # share of its shingles found in any of the others


def overlaps(sets: Sequence[Hashes], subjects: Sequence[int]) -> list[Overlap]:
    """Compare each text of `subjects` (indices into `sets`) with all the other texts."""
    sizes = np.array([s.size for s in sets], dtype=np.int64)
    owners = np.repeat(np.arange(len(sets)), sizes)
    everything = np.concatenate(sets) if len(sets) else np.zeros(0, dtype=np.uint64)
    order = np.argsort(everything, kind="stable")
    everything, owners = everything[order], owners[order]
    return [_overlap(sets[subject], subject, everything, owners, len(sets)) for subject in subjects]


def _overlap(
    wanted: Hashes, subject: int, everything: Hashes, owners: npt.NDArray[np.int64], num_texts: int
) -> Overlap:
    if wanted.size == 0:
        return Overlap(largest=0.0, nearest=-1, anywhere=0.0)
    first = np.searchsorted(everything, wanted, side="left")
    count = np.searchsorted(everything, wanted, side="right") - first
    # every index first[i] .. first[i] + count[i] in one array: the texts that hold shingle i, itself among them
    rows = np.repeat(first - np.concatenate(([0], np.cumsum(count)[:-1])), count) + np.arange(count.sum())
    shared = np.bincount(owners[rows], minlength=num_texts)
    shared[subject] = 0
    nearest = int(shared.argmax())
    return Overlap(
        largest=float(shared[nearest] / wanted.size),
        nearest=nearest if shared[nearest] else -1,
        anywhere=float((count > 1).mean()),  # a set holds a hash once, so more than one holder means another text
    )
