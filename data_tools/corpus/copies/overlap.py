"""Near-copies: how much of one text stands, word for word, in others. Plain numpy, exact, no sampling.

A text becomes the set of its shingles: every run of eight words, hashed to 64 bits. The containment of a text
in another is the share of its shingles that the other has too: 1 for a copy, about 0.4 when one word in ten
was changed (0.9^8), and near 0 for unrelated texts, which share a licence header or an idiom at most.
Called by the corpus builders to keep held-out files honest. It knows nothing of files, tokens or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_tools.corpus.flow.words import Hashes
from data_tools.corpus.flow.words import shingles as shingles_of

SHINGLE_WORDS = 8
# because: over the standard library, 7 in 10 files share less than 0.05 with any one other file, and what they share is
# licence, imports and idiom. Above 0.2 stand the texts that were written by copying (bz2 and lzma, wave and aifc, the
# MIME types, the codecs). One word in six changed at random still leaves 0.23.
NEAR_COPY = 0.2


def shingles(text: str, words: int = SHINGLE_WORDS) -> Hashes:
    """The sorted distinct hashes of every run of `words` words; a shorter text is one single shingle."""
    return shingles_of(text, words)


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
