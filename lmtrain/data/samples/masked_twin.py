"""BERT's samples in Python: the reference for csrc/masked.cpp, which does the same about 80 times faster.

Called by masked.py if the compiled helper is missing. Sample number s is row s % num_rows of the map; all its random
draws come from the stream of s, so that the sample is the same in any batch and any order. The draws, in order:

1. With pairs: the start of the second segment (drawn if there are three sentences or more), then a coin. Heads under
   sentence_order: the two segments are swapped. Heads under next_sentence: the second segment is taken from another
   document instead, starting at any sentence of any sample of the map that is not in this document.
2. Tokens above the target length are removed from the longer segment, from the second if they are equal; a coin per
   token decides between the front and the back.
3. [CLS] first [SEP] second [SEP]. Words are visited in random order. An n-gram begins at each word, n drawn with the
   weights 1/n; it ends at the segment's end and loses words that exceed the budget (a share of the tokens). It is
   masked as a whole, or skipped if any of its words is masked already.
4. A masked token becomes [MASK] in 80 of 100 cases and any other non-special token in 10. These draws have a stream of
   their own, in which place p of the row takes draw p.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import IGNORED
from lmtrain.data.samples.sentence_pairs import Draws, draw_at, stream

Ints = NDArray[Any]
Run = tuple[int, int]  # first token, number of tokens

BEGINS, CONTINUES, SPECIAL = 0, 1, 2  # kinds of ids: first piece of a word, later piece, special token
_MASK, _RANDOM = 3435973837, 3865470567  # 0.8 and 0.9 times 2**32


class Pairs(IntEnum):
    none = 0
    next_sentence = 1
    sentence_order = 2


@dataclass(frozen=True)
class Sample:
    tokens: list[int]  # before masking
    second: int  # place where the second segment begins
    label: bool
    masked: list[int]  # places of the masked tokens
    replaced: list[int]  # ids that replace the tokens at these places
    runs: tuple[Run, Run]  # token runs that the segments were read from


@dataclass(frozen=True)
class Sentences:
    """Source of samples: token ids, the bounds of sentences and documents, and the map of samples."""

    tokens: Ints
    lengths: Ints  # tokens per sentence
    pointers: Ints  # start of each sentence, in bytes
    bounds: Ints  # first sentence of each document, and the end
    rows: Ints  # the map of sentence_pairs.py


@dataclass(frozen=True, kw_only=True)
class MaskedSamplerTwin(Sentences):
    kinds: Ints  # BEGINS, CONTINUES or SPECIAL for every id
    specials: list[int]  # ids, sorted
    cls: int
    sep: int
    mask: int
    pad: int
    seq_len: int
    pairs: int
    share: int  # share of the tokens to mask, times 2**32
    max_predictions: int
    ngram_thresholds: list[int]  # n is 1 + how many thresholds a 32-bit draw reaches
    seed: int

    def batch(self, ids: Ints) -> tuple[Ints, ...]:
        """Return tokens, labels, segments, the mask of non-padding, pair labels, and the token runs that were read."""
        shape = (len(ids), self.seq_len)
        tokens, labels = np.full(shape, self.pad, np.int64), np.full(shape, IGNORED, np.int64)
        segments, real, pair = np.zeros(shape, np.int64), np.zeros(shape, np.bool_), np.zeros(len(ids), np.int64)
        runs: list[Run] = []
        for i, number in enumerate(self._checked(ids)):
            sample = self.sample(number)
            size = len(sample.tokens)
            tokens[i, :size] = sample.tokens
            labels[i, sample.masked] = tokens[i, sample.masked]
            tokens[i, sample.masked] = sample.replaced
            segments[i, sample.second : size] = 1
            real[i, :size] = True
            pair[i] = sample.label
            runs += sample.runs
        return tokens, labels, segments, real, pair, _two_rows(runs)

    def counts(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return (masked tokens, all tokens) per sample, and the token runs that were read."""
        samples = [self.sample(number) for number in self._checked(ids)]
        sizes = [(len(one.masked), len(one.tokens)) for one in samples]
        return np.array(sizes, np.int64).reshape(-1, 2), _two_rows([run for one in samples for run in one.runs])

    def runs(self, ids: Ints) -> Ints:
        """Return the two token runs of each sample, as a row of first tokens and a row of lengths."""
        found = (self._runs(number, Draws(stream(self.seed, number)))[:2] for number in self._checked(ids))
        return _two_rows([run for both in found for run in both])

    def sample(self, number: int) -> Sample:
        key = stream(self.seed, number)
        draws = Draws(key)
        a, b, label = self._runs(number, draws)
        head = [self.cls, *self._read(a), self.sep]
        tail = [] if self.pairs == Pairs.none else [*self._read(b), self.sep]
        tokens, second = head + tail, len(head)
        places = [
            place for first, last in self.choose(self.words(tokens, second), len(tokens), draws)
            for place in range(first, last)
        ]  # fmt: skip
        lots = stream(key, 1)
        replaced = [self._replaced(tokens[p], draw_at(lots, p)) for p in places]
        return Sample(tokens, second, label, places, replaced, (a, b))

    def words(self, tokens: list[int], second: int) -> list[Run]:
        """Return (first place, one past the last place) of each word, continuation pieces included."""
        words: list[Run] = []
        for place in range(1, len(tokens) - 1):
            kind = self.kinds[tokens[place]]
            if place == second - 1 or kind == SPECIAL:
                continue
            if kind == CONTINUES and words and words[-1][1] == place:
                words[-1] = words[-1][0], place + 1
            else:
                words.append((place, place + 1))
        return words

    def choose(self, words: list[Run], num_tokens: int, draws: Draws) -> list[Run]:
        """Return the places of the n-grams to mask, in the order in which they are drawn."""
        budget = min(max((num_tokens * self.share + 2**31) >> 32, 1), self.max_predictions)
        order, taken, chosen = list(range(len(words))), [False] * len(words), []
        for i in range(len(words)):
            if budget == 0:
                break
            j = i + draws.below(len(words) - i)
            order[i], order[j] = order[j], order[i]
            first = last = order[i]
            for _ in range(self.ngram(draws) - 1):
                if last + 1 == len(words) or words[last + 1][0] != words[last][1]:
                    break
                last += 1
            while last > first and words[last][1] - words[first][0] > budget:
                last -= 1
            size = words[last][1] - words[first][0]
            if size > budget or any(taken[first : last + 1]):
                continue
            taken[first : last + 1] = [True] * (last + 1 - first)
            chosen.append((words[first][0], words[last][1]))
            budget -= size
        return chosen

    def ngram(self, draws: Draws) -> int:
        if not self.ngram_thresholds:
            return 1
        drawn = draws.next() >> 32
        return 1 + sum(drawn >= threshold for threshold in self.ngram_thresholds)

    def _replaced(self, token: int, drawn: int) -> int:
        lot = drawn >> 32
        if lot < _MASK:
            return self.mask
        if lot >= _RANDOM:
            return token
        other = ((drawn & 0xFFFFFFFF) * (len(self.kinds) - len(self.specials))) >> 32
        for special in self.specials:
            other += other >= special
        return other

    def _runs(self, number: int, draws: Draws) -> tuple[Run, Run, bool]:
        first, end, target = self.rows[number % len(self.rows)].tolist()
        pivot, label = end, False
        if self.pairs != Pairs.none:
            pivot = first + (1 + draws.below(end - first - 1) if end - first >= 3 else 1)
            label = bool(draws.next() >> 63)
        a, b = self._run(first, pivot), self._run(pivot, end)
        if label and self.pairs == Pairs.next_sentence:
            b = self._other(first, target - a[1], draws)
        elif label:
            a, b = b, a
        return *shorten(a, b, target, draws), label

    def _run(self, first: int, end: int) -> Run:
        if first >= end:
            return 0, 0
        return int(self.pointers[first]) // self.tokens.itemsize, int(self.lengths[first:end].sum())

    def _other(self, sentence: int, room: int, draws: Draws) -> Run:
        """Return sentences of another document: at least one, then more while they have less than `room` tokens."""
        d = bisect_right(self.bounds, sentence)
        low, high = np.searchsorted(self.rows[:, 0], self.bounds[d - 1 : d + 1]).tolist()
        number = draws.next() % (len(self.rows) - (high - low))
        begin, end, _ = self.rows[number if number < low else number + high - low].tolist()
        first = begin + draws.below(end - begin)
        stop = int(self.bounds[bisect_right(self.bounds, first)])
        last = first + 1
        while last < stop and self._run(first, last)[1] < room:
            last += 1
        return self._run(first, last)

    def _read(self, run: Run) -> list[int]:
        tokens: list[int] = self.tokens[run[0] : run[0] + run[1]].tolist()
        for i, token in enumerate(tokens, run[0]):
            if not 0 <= token < len(self.kinds):
                raise IndexError(f"the id {token} as token {i}")
        return tokens

    def _checked(self, ids: Ints) -> list[int]:
        if (ids < 0).any():
            raise ValueError("ids begin at 0")
        return list(map(int, ids))


def shorten(a: Run, b: Run, target: int, draws: Draws) -> tuple[Run, Run]:
    """Return both runs cut to `target` tokens in total: the longer run is cut first, `b` if they are equal."""
    excess = a[1] + b[1] - target
    if excess <= 0:
        return a, b
    level = min(excess, abs(a[1] - b[1]))
    from_a = (excess - level) // 2 + (level if a[1] > b[1] else 0)
    from_b = excess - from_a
    a = a[0] + draws.count_ones(from_a), a[1] - from_a
    return a, (b[0] + draws.count_ones(from_b), b[1] - from_b)


def _two_rows(runs: list[Run]) -> Ints:
    return np.ascontiguousarray(np.array(runs, np.int64).reshape(-1, 2).T)
