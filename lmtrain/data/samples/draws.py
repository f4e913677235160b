"""Random numbers by name instead of by state: any draw of any stream, without those before it. Torch-free.

Called by the Python twins of csrc/sentence_pairs.cpp and csrc/masked.cpp; csrc/draws.h holds the same numbers. Draw i
(from 0) of the stream `key` is mix(key + (i + 1) * golden), which is splitmix64's rule.
"""

from __future__ import annotations

from lmtrain.data.order import mix

_GOLDEN = 0x9E3779B97F4A7C15


def stream(seed: int, number: int) -> int:
    """The key of the stream with this number."""
    return mix(mix(seed) + number * _GOLDEN)


def draw_at(key: int, i: int) -> int:
    """64 random bits."""
    return mix(key + (i + 1) * _GOLDEN)


class Draws:
    """The draws of one stream, one after the other."""

    def __init__(self, key: int) -> None:
        self._key, self._i = key, 0

    def next(self) -> int:
        self._i += 1
        return draw_at(self._key, self._i - 1)

    def below(self, n: int) -> int:
        """A number of 0..n-1, for n up to 2**32."""
        return ((self.next() >> 32) * n) >> 32

    def count_ones(self, bits: int) -> int:
        """How many of the next `bits` bits are 1; a draw has 64 of them and is not shared with what follows."""
        ones = 0
        while bits > 0:
            ones += (self.next() & ((1 << min(bits, 64)) - 1)).bit_count()
            bits -= 64
        return ones
