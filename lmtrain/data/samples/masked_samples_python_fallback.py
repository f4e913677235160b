"""BERT's samples in Python: the reference for csrc/masked.cpp, which does the same about 80 times faster.

Called by masked_language_samples.py if the compiled helper is missing. Sample number s is row s % num_rows of the map;
all its random draws come from the stream of s, so that the sample is the same in any batch and any order. The draws, in
order:

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

import numpy as np

from lmtrain.batch import IGNORED
from lmtrain.data.samples.group_sentences_into_samples import Draws, Ints, draw_at, stream_key

Run = tuple[int, int]  # first token, number of tokens

BEGINS, CONTINUES, SPECIAL = 0, 1, 2  # kinds of ids: first piece of a word, later piece, special token
_MASK_BELOW, _KEEP_FROM = 3435973837, 3865470567  # 0.8 and 0.9 times 2**32


class Pairs(IntEnum):
    """Kinds of sentence pairs, numbered as in csrc/masked.cpp."""

    none = 0
    next_sentence = 1
    sentence_order = 2


@dataclass(frozen=True)
class Sample:
    """A masked sample before padding."""

    tokens: list[int]  # before masking
    second_start: int  # place where the second segment begins
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
    rows: Ints  # the map of group_sentences_into_samples.py


@dataclass(frozen=True, kw_only=True)
class MaskedSamplerTwin(Sentences):
    """Sampler that makes masked samples by number: the Python reference for the compiled `MaskedSampler`."""

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
        """Return the arrays of a batch of B samples: tokens, labels, segments, mask of non-padding (each [B, seq_len]),
        pair labels [B], and the token runs that were read [2, 2B], as a row of first tokens and a row of lengths.
        """
        shape = (len(ids), self.seq_len)
        tokens, labels = np.full(shape, self.pad, np.int64), np.full(shape, IGNORED, np.int64)
        segments, real, pair = np.zeros(shape, np.int64), np.zeros(shape, np.bool_), np.zeros(len(ids), np.int64)
        runs: list[Run] = []
        for i, number in enumerate(self._checked_numbers(ids)):
            sample = self.sample(number)
            size = len(sample.tokens)
            tokens[i, :size] = sample.tokens
            labels[i, sample.masked] = tokens[i, sample.masked]
            tokens[i, sample.masked] = sample.replaced
            segments[i, sample.second_start : size] = 1
            real[i, :size] = True
            pair[i] = sample.label
            runs += sample.runs
        return tokens, labels, segments, real, pair, _runs_to_array(runs)

    def counts(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return two arrays for B samples: (masked tokens, all tokens) per sample [B, 2], and the token runs that were
        read [2, 2B], as a row of first tokens and a row of lengths.
        """
        samples = [self.sample(number) for number in self._checked_numbers(ids)]
        sizes = [(len(sample.masked), len(sample.tokens)) for sample in samples]
        runs = _runs_to_array([run for sample in samples for run in sample.runs])
        return np.array(sizes, np.int64).reshape(-1, 2), runs

    def runs(self, ids: Ints) -> Ints:
        """Return the token runs of the two segments of each of B samples, as an array [2, 2B]: first tokens and
        lengths.
        """
        draws = ((number, Draws(stream_key(self.seed, number))) for number in self._checked_numbers(ids))
        return _runs_to_array([run for sample in draws for run in self._segment_runs(*sample)[:2]])

    def sample(self, number: int) -> Sample:
        """Build the sample with this number: read its segments, join them with [CLS] and [SEP], and choose the tokens
        to mask.
        """
        key = stream_key(self.seed, number)
        draws = Draws(key)
        a, b, label = self._segment_runs(number, draws)
        head = [self.cls, *self._read_tokens(a), self.sep]
        tail = [] if self.pairs == Pairs.none else [*self._read_tokens(b), self.sep]
        tokens, second_start = head + tail, len(head)
        places = [
            place for first, last in self.choose_ngrams(self.word_spans(tokens, second_start), len(tokens), draws)
            for place in range(first, last)
        ]  # fmt: skip
        replacement_key = stream_key(key, 1)
        replaced = [self._draw_replacement(tokens[p], draw_at(replacement_key, p)) for p in places]
        return Sample(tokens, second_start, label, places, replaced, (a, b))

    def word_spans(self, tokens: list[int], second_start: int) -> list[Run]:
        """Return (start, stop) of each word in a sample's tokens; a word includes its continuation pieces.
        `second_start` is the index at which the second segment begins.
        """
        spans: list[Run] = []
        for place in range(1, len(tokens) - 1):
            kind = self.kinds[tokens[place]]
            if place == second_start - 1 or kind == SPECIAL:
                continue
            if kind == CONTINUES and spans and spans[-1][1] == place:
                spans[-1] = spans[-1][0], place + 1
            else:
                spans.append((place, place + 1))
        return spans

    def choose_ngrams(self, spans: list[Run], num_tokens: int, draws: Draws) -> list[Run]:
        """Choose random n-grams of words to mask; return (start, stop) of each in the sample's tokens. `spans` are
        (start, stop) of the sample's words and `num_tokens` is its length, a share of which is masked.
        """
        budget = min(max((num_tokens * self.share + 2**31) >> 32, 1), self.max_predictions)
        order, is_masked, chosen = list(range(len(spans))), [False] * len(spans), []
        for i in range(len(spans)):
            if budget == 0:
                break
            j = i + draws.below(len(spans) - i)
            order[i], order[j] = order[j], order[i]
            first = last = order[i]
            for _ in range(self.draw_ngram_length(draws) - 1):
                if last + 1 == len(spans) or spans[last + 1][0] != spans[last][1]:
                    break
                last += 1
            while last > first and spans[last][1] - spans[first][0] > budget:
                last -= 1
            size = spans[last][1] - spans[first][0]
            if size > budget or any(is_masked[first : last + 1]):
                continue
            is_masked[first : last + 1] = [True] * (last + 1 - first)
            chosen.append((spans[first][0], spans[last][1]))
            budget -= size
        return chosen

    def draw_ngram_length(self, draws: Draws) -> int:
        """Draw the number of words n of an n-gram; n has a probability in proportion to 1/n."""
        if not self.ngram_thresholds:
            return 1
        draw = draws.next() >> 32
        return 1 + sum(draw >= threshold for threshold in self.ngram_thresholds)

    def _draw_replacement(self, token: int, draw: int) -> int:
        """Return the id that replaces a masked token: [MASK] (80%), `token` itself (10%) or a random id that is not
        special (10%). `draw` is the 64 random bits that decide.
        """
        draw_32 = draw >> 32
        if draw_32 < _MASK_BELOW:
            return self.mask
        if draw_32 >= _KEEP_FROM:
            return token
        replacement = ((draw & 0xFFFFFFFF) * (len(self.kinds) - len(self.specials))) >> 32
        for special in self.specials:
            replacement += replacement >= special
        return replacement

    def _segment_runs(self, number: int, draws: Draws) -> tuple[Run, Run, bool]:
        """Return (token run of the first segment, token run of the second, pair label) of sample `number`. The label is
        True if the segments were swapped or the second one is from another document.
        """
        first, end, target = self.rows[number % len(self.rows)].tolist()
        pivot, label = end, False
        if self.pairs != Pairs.none:
            pivot = first + (1 + draws.below(end - first - 1) if end - first >= 3 else 1)
            label = bool(draws.next() >> 63)
        a, b = self._sentence_run(first, pivot), self._sentence_run(pivot, end)
        if label and self.pairs == Pairs.next_sentence:
            b = self._other_document_run(first, target - a[1], draws)
        elif label:
            a, b = b, a
        return *shorten_segments(a, b, target, draws), label

    def _sentence_run(self, first: int, end: int) -> Run:
        """Return the token run (first token, number of tokens) of the sentences first to end - 1."""
        if first >= end:
            return 0, 0
        return int(self.pointers[first]) // self.tokens.itemsize, int(self.lengths[first:end].sum())

    def _other_document_run(self, own_sentence: int, max_tokens: int, draws: Draws) -> Run:
        """Draw consecutive sentences of a document other than that of the sentence `own_sentence`; return their token
        run (first token, number of tokens). Sentences are added until the run has at least `max_tokens` tokens or the
        document ends.
        """
        d = bisect_right(self.bounds, own_sentence)
        low, high = np.searchsorted(self.rows[:, 0], self.bounds[d - 1 : d + 1]).tolist()
        number = draws.next() % (len(self.rows) - (high - low))
        begin, end, _ = self.rows[number if number < low else number + high - low].tolist()
        first = begin + draws.below(end - begin)
        stop = int(self.bounds[bisect_right(self.bounds, first)])
        last = first + 1
        while last < stop and self._sentence_run(first, last)[1] < max_tokens:
            last += 1
        return self._sentence_run(first, last)

    def _read_tokens(self, run: Run) -> list[int]:
        """Return the ids of a token run (first token, number of tokens). Raise IndexError if an id is outside the
        vocabulary.
        """
        tokens: list[int] = self.tokens[run[0] : run[0] + run[1]].tolist()
        for i, token in enumerate(tokens, run[0]):
            if not 0 <= token < len(self.kinds):
                raise IndexError(f"token {i} has the id {token}, which is outside the vocabulary")
        return tokens

    def _checked_numbers(self, ids: Ints) -> list[int]:
        """Return the sample numbers `ids` as a list of int. Raise ValueError if any is negative."""
        if (ids < 0).any():
            raise ValueError(f"the sample id {ids.min()} is negative; ids begin at 0")
        return list(map(int, ids))


def shorten_segments(a: Run, b: Run, target: int, draws: Draws) -> tuple[Run, Run]:
    """Cut the token runs of two segments to `target` tokens in total and return them: the longer segment is first cut
    to the length of the other, then both equally, `b` by one more if the number is odd.

    A random bit per removed token decides between the run's front and back.
    """
    excess = a[1] + b[1] - target
    if excess <= 0:
        return a, b
    level = min(excess, abs(a[1] - b[1]))
    from_a = (excess - level) // 2 + (level if a[1] > b[1] else 0)
    from_b = excess - from_a
    a = a[0] + draws.count_ones(from_a), a[1] - from_a
    return a, (b[0] + draws.count_ones(from_b), b[1] - from_b)


def _runs_to_array(runs: list[Run]) -> Ints:
    """Return an array of two rows: first tokens and lengths."""
    return np.ascontiguousarray(np.array(runs, np.int64).reshape(-1, 2).T)
