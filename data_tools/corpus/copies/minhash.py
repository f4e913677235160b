"""MinHash: a text as a few hundred small numbers, whose agreement estimates how much two texts share.

Texts become sets of runs of five words. For each of many hash functions the smallest value over the set is kept, 16
bits of it. The share of functions on which two texts agree estimates their Jaccard similarity, with a standard error
of 0.025 at 0.8. Bands of functions are hashed to one key each: texts with an equal key in any band become candidates.
Called by duplicates.py and matches.py; it knows nothing of files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from data_tools.corpus.flow.words import Hashes, mix, shingles
from lmtrain import native

Signature = npt.NDArray[np.uint16]
_CHUNK = 512  # because: 512 x 256 x 8 bytes is 1 MB, which stays in a core's cache
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class MinHash:
    """The shape of a signature. Two texts become candidates with probability 1 - (1 - s^rows)^bands at similarity s."""

    bands: int = 32
    rows: int = 8
    words: int = 5

    @property
    def num_hashes(self) -> int:
        return self.bands * self.rows

    def signature(self, text: str) -> Signature | None:
        """None for a text without words, which is like no other."""
        found = shingles(text, self.words)
        return minima(found, self.num_hashes) if found.size else None

    def band_keys(self, signatures: Signature, band: int) -> Hashes:
        """One key a row of signatures; equal keys mean that the band is equal."""
        columns = signatures[:, band * self.rows : (band + 1) * self.rows].astype(np.uint64)
        keys = np.full(len(signatures), band, np.uint64)
        for column in columns.T:
            keys = mix(keys * _GOLDEN + column)
        return keys


@lru_cache(maxsize=4)
def _functions(count: int) -> tuple[Hashes, Hashes]:
    """Odd factors and offsets, the same everywhere and for ever."""
    numbers = mix(np.arange(1, 2 * count + 1, dtype=np.uint64) * _GOLDEN)
    return numbers[:count] | np.uint64(1), numbers[count:]


def minima(values: Hashes, count: int) -> Signature:
    """For each of `count` functions a*x + b the smallest over the values, of which bits 16 to 31 are kept."""
    factors, offsets = _functions(count)
    if native.lib is not None:
        result: Signature = native.lib.minhash(values, factors, offsets)
        return result
    return minima_twin(values, factors, offsets)


def minima_twin(values: Hashes, factors: Hashes, offsets: Hashes) -> Signature:
    smallest = np.full(factors.size, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, values.size, _CHUNK):
        chunk = values[start : start + _CHUNK, None] * factors + offsets
        np.minimum(smallest, chunk.min(axis=0), out=smallest)
    # because: the top bits of a minimum are nearly always zero, and tell no two texts apart
    return (smallest >> np.uint64(16)).astype(np.uint16)


def similarity(first: Signature, second: Signature) -> npt.NDArray[np.float64]:
    """The estimated Jaccard similarity, row by row."""
    return np.asarray((first == second).mean(axis=1), np.float64)
