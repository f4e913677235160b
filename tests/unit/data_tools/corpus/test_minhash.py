"""MinHash: signatures estimate similarity, bands catch what they should, the compiled loop equals its twin."""

from __future__ import annotations

import random

import numpy as np
import pytest

from data_tools.corpus.copies.dedupe import MinHash, _hash_functions, min_hashes, min_hashes_twin, similarity
from lmtrain.runtime import compiled_helpers


def edited(words: list[str], share: float, seed: int) -> list[str]:
    chance = random.Random(seed)
    return [f"edit{seed}x{i}" if chance.random() < share else word for i, word in enumerate(words)]


def jaccard(first: list[str], second: list[str]) -> float:
    left, right = ({tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in (first, second))
    return len(left & right) / len(left | right)


def test_the_estimate_is_unbiased_and_as_sharp_as_promised() -> None:
    minhash = MinHash()
    errors = []
    for seed in range(120):
        words = [f"w{seed}x{i}" for i in range(300)]
        other = edited(words, (seed % 12) / 60, seed)
        first, second = minhash.signature(" ".join(words)), minhash.signature(" ".join(other))
        assert first is not None
        assert second is not None
        errors.append(float(similarity(first[None], second[None])[0]) - jaccard(words, other))
    assert abs(np.mean(errors)) < 0.01
    assert np.std(errors) < 0.035


def test_equal_texts_agree_and_unlike_ones_do_not() -> None:
    minhash = MinHash()
    texts = ["one two three four five six seven", "One two, three four FIVE six\nseven", "eight nine ten " * 5]
    signatures = np.stack([s for s in map(minhash.signature, texts) if s is not None])
    assert similarity(signatures[:1], signatures[1:]).tolist() == [1.0, 0.0]
    assert minhash.signature("...") is None


def test_equal_bands_have_equal_keys_and_bands_differ() -> None:
    minhash = MinHash(bands=4, rows=3)
    signatures = np.random.default_rng(0).integers(0, 2**16, (100, 12), dtype=np.uint16)
    signatures[1, 3:6] = signatures[0, 3:6]
    keys = np.stack([minhash.band_keys(signatures, band) for band in range(4)])
    assert keys[1, 0] == keys[1, 1]
    assert len(np.unique(keys)) == keys.size - 1


def chance(similarity: float) -> float:
    """That two texts this similar meet in a band, by the closed form."""
    return float(1 - (1 - similarity ** MinHash().rows) ** MinHash().bands)


def test_similar_texts_are_likely_candidates() -> None:
    assert chance(0.8) > 0.995
    assert chance(0.5) < 0.15
    assert chance(0.3) < 0.003


@pytest.mark.parametrize("size", [1, 7, 512, 513, 2000])
@pytest.mark.parametrize("count", [1, 6, 256])
def test_the_compiled_loop_equals_its_twin(size: int, count: int) -> None:
    values = np.random.default_rng(size).integers(0, 2**64 - 1, size, dtype=np.uint64)
    factors, offsets = _hash_functions(count)
    expected = ((values[:, None] * factors + offsets).min(axis=0) >> np.uint64(16)) & np.uint64(0xFFFF)
    assert np.array_equal(min_hashes_twin(values, factors, offsets), expected)
    assert np.array_equal(min_hashes(values, count), expected)
    if compiled_helpers.lib is not None:
        assert np.array_equal(compiled_helpers.lib.minhash(values, factors, offsets), expected)
