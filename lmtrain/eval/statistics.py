"""Uncertainty of measures: bootstrap intervals, paired comparison of two models, and count-based baselines.

Called by the runner for a measure's interval, by `lmtrain eval --compare` and by `--baseline`. Two models are resampled
with the same items, so that the difficulty of items cancels out and a difference is more certain than either measure. A
trained model must beat the baselines' scores on the same targets. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.errors import DataError, leave_out
from lmtrain.eval.task import (
    BaselineResult,
    Columns,
    Prepared,
    Result,
    Task,
    bits_per_byte,
    finite_or_none,
    perplexity,
    sum_columns,
)
from lmtrain.eval.task_recipes.hash_and_count_texts import open_dataset
from lmtrain.eval.windows import Tokens
from lmtrain.tokenizer.text_to_ids_and_back import Tokenizer

RESAMPLES = 1000
LEVEL = 0.95
SEED = 0
MAX_UNITS = 10_000  # because: a million items would take minutes, and sums of groups say the same
COMPARED_FIELDS = ("protocol", "protocol_version", "text_sha256", "limit", "stride", "prefix", "num_items")
_RESAMPLES_AT_ONCE = 50  # resamples at once; 10,000 items make 4 MB of counts
CHUNK_TOKENS = 1 << 24  # because: 128 MiB of pair keys at a time, so that a memory-mapped corpus is never loaded whole

Table = Mapping[str, NDArray[np.float64]]
Measures = Callable[[Mapping[str, float]], dict[str, float]]
Interval = tuple[float, float]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def intervals(columns: Table, measures: Measures, resamples: int = RESAMPLES) -> dict[str, Interval]:
    """Return measure name -> (low, high), the middle 95% of its values over bootstrap resamples of the items. `columns`
    has a value per item, and `measures` computes all measures from sums of the columns. Empty for fewer than two items.
    """
    values_by_name: dict[str, list[float]] = {}
    for sums in resampled_sums(columns, resamples):
        for name, value in measures(sums).items():
            values_by_name.setdefault(name, []).append(value)
    found = {name: middle_interval(values) for name, values in values_by_name.items()}
    return {name: interval for name, interval in found.items() if interval is not None}


def middle_interval(values: list[float]) -> Interval | None:
    """Return (low, high), the bounds of the middle 95% of `values`; None if there are no values, or one is NaN."""
    if not values or np.isnan(values).any():
        return None
    edge = (1 - LEVEL) / 2
    low, high = np.quantile(values, [edge, 1 - edge], method="inverted_cdf")  # because: infinity is a value as well
    return float(low), float(high)


def resampled_sums(columns: Table, resamples: int = RESAMPLES) -> Iterator[dict[str, float]]:
    """Yield one dict per bootstrap resample of the items, `resamples` in all: column name -> sum of the column over the
    resample. `columns` has a value per item; with fewer than two items nothing is yielded.

    Resamples depend only on the number of items, so that two models are resampled alike.
    """
    names = list(columns)
    table_IC = _grouped_rows(np.stack([columns[name] for name in names], axis=1))
    num_units = len(table_IC)
    if num_units < 2:
        return
    random = np.random.default_rng(SEED)
    for first in range(0, resamples, _RESAMPLES_AT_ONCE):
        rows = min(_RESAMPLES_AT_ONCE, resamples - first)
        draws = random.integers(0, num_units, (rows, num_units)) + num_units * np.arange(rows)[:, None]
        counts_RI = np.bincount(draws.ravel(), minlength=rows * num_units).reshape(rows, num_units)
        for sums in counts_RI.astype(np.float64) @ table_IC:
            yield dict(zip(names, sums.tolist(), strict=True))


def _grouped_rows(table_IC: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rows from which bootstrap resamples are drawn, at most MAX_UNITS: those of `table_IC` [item, column],
    or if it has more, sums of them (row i is added to row i % MAX_UNITS of the result).
    """
    num_items = len(table_IC)
    if num_items <= MAX_UNITS:
        return table_IC
    units = np.zeros((MAX_UNITS, table_IC.shape[1]))
    np.add.at(units, np.arange(num_items) % MAX_UNITS, table_IC)
    return units


@dataclass(frozen=True)
class Side:
    """A model in a comparison of two: its result and its values per item."""

    name: str  # results file or checkpoint
    result: Result
    columns: Columns


@dataclass(frozen=True)
class Difference:
    """A measure of two models, a and b, and the difference between them."""

    a: float
    b: float
    difference: float  # b - a
    interval: Interval | None  # of the difference; None for one item

    @property
    def beyond_chance(self) -> bool:
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True)
class Comparison:
    """The differences between two models' measures on the same items."""

    task: str
    protocol: str
    headline: str
    data: str
    num_items: int
    differences: dict[str, Difference]
    left_out: tuple[str, ...]  # measures per token, if the tokenizers differ

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        for name, difference in self.differences.items():
            plain["differences"][name]["beyond_chance"] = difference.beyond_chance
        return {key: finite_or_none(value) for key, value in plain.items()}


def compare(task: Task, a: Side, b: Side, resamples: int = RESAMPLES) -> Comparison:
    """Return the differences between two models' measures on the same items, with bootstrap intervals. `a` and `b` are
    the models' results with their values per item. Raise DataError if their protocols or texts differ.
    """
    check_comparable(a, b)
    a_measures, b_measures = (task.measures(sum_columns(side.columns)) for side in (a, b))
    same_tokens = a.result.tokenizer_fingerprint == b.result.tokenizer_fingerprint
    shared = [name for name in a_measures if name in b_measures]
    compared = [name for name in shared if same_tokens or "token" not in name]
    resampled = [
        (task.measures(x), task.measures(y))
        for x, y in zip(resampled_sums(a.columns, resamples), resampled_sums(b.columns, resamples), strict=True)
    ]
    return Comparison(
        task=a.result.task,
        protocol=a.result.protocol,
        headline=a.result.headline,
        data=a.result.data,
        num_items=a.result.num_items,
        differences={
            name: Difference(
                a_measures[name],
                b_measures[name],
                b_measures[name] - a_measures[name],
                middle_interval([y.get(name, math.nan) - x.get(name, math.nan) for x, y in resampled]),
            )
            for name in compared
        },
        left_out=tuple(name for name in shared if name not in compared),
    )


def check_comparable(a: Side, b: Side) -> None:
    """Raise DataError, naming the differences, unless `a` and `b` are results of the same protocol on the same text."""
    differs = [
        f"{key} {getattr(a.result, key)} and {getattr(b.result, key)}"
        for key in COMPARED_FIELDS
        if getattr(a.result, key) != getattr(b.result, key)
    ]
    if not differs and not np.array_equal(a.columns["bytes"], b.columns["bytes"]):
        differs = ["bytes of the items"]
    if differs:
        raise DataError(
            f"The results of {a.name} and {b.name} cannot be compared: {'; '.join(differs)} differ. "
            "Evaluate both on the same file with the same options."
        )


class Unigram:
    """P(w): the relative frequency of each token, with some probability kept for unseen tokens."""

    def __init__(self, train_tokens: Tokens, vocab_size: int) -> None:
        counts = np.zeros(vocab_size, dtype=np.int64)
        for chunk in _chunks(train_tokens, vocab_size, overlap=0):
            counts += np.bincount(chunk, minlength=vocab_size)
        num_kinds = max(int(np.count_nonzero(counts)), 1)  # an empty corpus leaves the uniform distribution
        self.vocab_size = vocab_size
        self.probabilities: Floats = (counts + num_kinds / vocab_size) / (counts.sum() + num_kinds)

    def nll(self, tokens: Tokens) -> float:
        """Return the nats to encode one document's tokens, each independently."""
        return float(-np.log(self.probabilities[_check_ids(tokens, self.vocab_size)]).sum())


class WittenBellBigram:
    """P(w | c): counts of pairs, interpolated with the unigram by the number of distinct tokens that followed c."""

    def __init__(self, train_tokens: Tokens, vocab_size: int, eod_id: int) -> None:
        self.vocab_size, self.eod_id = vocab_size, eod_id
        self.unigram = Unigram(train_tokens, vocab_size)
        self._pairs, self._counts = _count_pairs(train_tokens, vocab_size)  # the pair (c, w) has the key c * V + w
        contexts = self._pairs // vocab_size
        self._kinds_after = np.bincount(contexts, minlength=vocab_size)
        self._tokens_after: Ints = np.zeros(vocab_size, dtype=np.int64)
        np.add.at(self._tokens_after, contexts, self._counts)  # because: bincount's weights would round beyond 2^53

    def probabilities(self, contexts: Tokens, tokens: Tokens) -> Floats:
        """Return the probability of each token in `tokens` after the token at the same position in `contexts`."""
        before, after = _check_ids(contexts, self.vocab_size), _check_ids(tokens, self.vocab_size)
        num_kinds = np.where(self._tokens_after[before] > 0, self._kinds_after[before], 1)
        return (self._count(before, after) + num_kinds * self.unigram.probabilities[after]) / (
            self._tokens_after[before] + num_kinds
        )

    def nll(self, tokens: Tokens) -> float:
        """Return the nats to encode one document's tokens; the first follows an end-of-document token."""
        ids = _check_ids(tokens, self.vocab_size)
        return float(-np.log(self.probabilities(np.concatenate(([self.eod_id], ids))[:-1], ids)).sum())

    def _count(self, before: Ints, after: Ints) -> Ints:
        if self._pairs.size == 0:
            return np.zeros(before.shape, dtype=np.int64)
        keys = before * self.vocab_size + after
        places = np.minimum(np.searchsorted(self._pairs, keys), self._pairs.size - 1)
        return np.where(self._pairs[places] == keys, self._counts[places], 0)


def _count_pairs(tokens: Tokens, vocab_size: int) -> tuple[Ints, Ints]:
    """Count all pairs of neighbouring tokens. Return the sorted keys of the pairs that occur, and their counts; the key
    of a pair is first id * `vocab_size` + second id.
    """
    keys: Ints = np.zeros(0, dtype=np.int64)
    counts: Ints = np.zeros(0, dtype=np.int64)
    for chunk in _chunks(tokens, vocab_size, overlap=1):
        new_keys, new_counts = np.unique(chunk[:-1] * vocab_size + chunk[1:], return_counts=True)
        merged, where = np.unique(np.concatenate((keys, new_keys)), return_inverse=True)
        total = np.zeros(merged.size, dtype=np.int64)
        np.add.at(total, where, np.concatenate((counts, new_counts)))
        keys, counts = merged, total
    return keys, counts


def _chunks(tokens: Tokens, vocab_size: int, overlap: int) -> Iterator[Ints]:
    for start in range(0, len(tokens), CHUNK_TOKENS):
        yield _check_ids(tokens[start : start + CHUNK_TOKENS + overlap], vocab_size)


def _check_ids(tokens: Tokens, vocab_size: int) -> Ints:
    """Return the token ids as int64. Raise DataError unless all are from 0 to `vocab_size` - 1."""
    ids = np.asarray(tokens, dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise DataError(
            f"The token ids go from {ids.min()} to {ids.max()}, but the vocabulary from 0 to {vocab_size - 1}. "
            "Count and score the tokens of the same tokenizer."
        )
    return ids


def add_baselines(result: Result, prepared: Prepared, train: Path, tokenizer: Tokenizer) -> Result:
    """Return a copy of `result` to which the scores of a unigram and a bigram model on the same targets are added.
    These models are counted on the tokens of the dataset with the path prefix `train`.

    Raise DataError if the task's documents are not scored whole, or without an end-of-document token.
    """
    if tokenizer.eod_id is None or prepared.documents is None:
        raise DataError(f"{result.protocol} has no baselines: they need whole documents with an end-of-document token. "
            f"{leave_out('--baseline', shown='Leave --baseline out')}.")
    indexed = open_dataset(train, tokenizer)
    bigram = WittenBellBigram(indexed.tokens, tokenizer.vocab_size, tokenizer.eod_id)
    return replace(
        result,
        baselines=tuple(
            _baseline_result(name, result, prepared, baseline)
            for name, baseline in (("unigram", bigram.unigram), ("bigram (Witten-Bell)", bigram))
        ),
        notes={
            **result.notes, "baselines_counted_on": str(train), "baselines_train_tokens": indexed.num_tokens
        },
    )  # fmt: skip


def _baseline_result(
    name: str, result: Result, prepared: Prepared, baseline: Unigram | WittenBellBigram
) -> BaselineResult:
    assert prepared.documents is not None
    nll = sum(baseline.nll(tokens[1:]) for tokens in prepared.documents)  # the first token is the prefix
    bits = bits_per_byte(nll, float(prepared.text_columns["bytes"].sum()))
    per_token = perplexity(nll, prepared.num_targets)
    return BaselineResult(
        name=name,
        nll_sum_nats=nll,
        bits_per_byte=bits,
        token_perplexity=per_token,
        model_bits_ratio=result.measures["bits_per_byte"] / bits,
        model_token_perplexity_ratio=result.measures["token_perplexity"] / per_token,
    )
