"""Named draws are splitmix64's, cover their range evenly, and streams differ."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from lmtrain.data.samples.group_sentences_into_samples import Draws, draw_at, stream_key


def test_draws_equal_splitmix64() -> None:
    draws = Draws(1234567)
    assert [draws.next() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert draw_at(1234567, 2) == 9817491932198370423


def test_draws_below_a_bound_are_even() -> None:
    draws = Draws(stream_key(7, 0))
    counts = np.bincount([draws.below(10) for _ in range(20_000)], minlength=10)
    assert ((counts - 2000) ** 2 / 2000).sum() < 28  # chi-squared with 9 degrees of freedom: 1 in 1000


def test_half_of_the_bits_are_ones() -> None:
    draws = Draws(stream_key(8, 1))
    assert abs(sum(draws.count_ones(bits) for bits in range(200)) - 9950) < 250
    assert [Draws(5).count_ones(bits) for bits in (0, 64)] == [0, draw_at(5, 0).bit_count()]


def test_streams_differ_in_half_of_their_bits() -> None:
    keys = [stream_key(seed, number) for seed in range(30) for number in range(30)]
    assert len(set(keys)) == 900
    ones = [(a ^ b).bit_count() for a, b in pairwise(keys)]
    assert 31.5 < np.mean(ones) < 32.5
