"""A few hundred samples that a small model can learn, with labels ignored unevenly, read by the real loader."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import IGNORED, Batch
from lmtrain.data.batch_size_per_step import BatchPlan
from lmtrain.data.loader import Loader
from lmtrain.data.sample_dataset_interface import Counts, ShuffledOrder
from lmtrain.data.samples.causal_language_samples import build_batch
from tests.layouts.cases import GLOBAL_BATCH, SEQ_LEN, VOCAB, Case

NUM_SAMPLES = 4 * GLOBAL_BATCH
Int64s = NDArray[np.int64]


@cache
def _samples(length: int) -> tuple[Int64s, Int64s]:
    """Tokens count up by a stride of the sample's own, with noise. A sample in seven has no label at all."""
    rng = np.random.default_rng(5)
    first, stride = rng.integers(VOCAB, size=(2, NUM_SAMPLES, 1))
    tokens = (first + stride * np.arange(length + 1)) % VOCAB
    noise = rng.random(tokens.shape) < 0.1
    tokens[noise] = rng.integers(VOCAB, size=int(noise.sum()))
    labels = tokens[:, 1:].copy()
    labels[rng.random(labels.shape) < rng.random((NUM_SAMPLES, 1)) / 2] = IGNORED
    labels[np.arange(NUM_SAMPLES) % 7 == 3] = IGNORED
    return tokens[:, :-1].copy(), labels


@cache
def _masked(length: int) -> Batch:
    """The same as rows of two segments, cut at lengths of their own, with most labels' tokens hidden."""
    tokens, labels = _samples(length)
    rng = np.random.default_rng(6)
    at, lengths = np.arange(length), rng.integers(6, length + 1, size=(NUM_SAMPLES, 1))
    real = at < lengths
    labels = np.where(real, np.where(labels == IGNORED, IGNORED, tokens), IGNORED)
    hidden = (labels != IGNORED) & (rng.random(labels.shape) < 0.8)
    segments = ((at >= rng.integers(2, 5, size=lengths.shape)) & real).astype(np.int64)
    pairs = rng.integers(2, size=NUM_SAMPLES)
    # because: a pair that can be told from its tokens gives the head something to learn
    shown = np.where((pairs[:, None] == 1) & (segments == 1), tokens[:, ::-1], tokens)
    return Batch(np.where(hidden, 0, shown), labels, segments_BT=segments, not_padding_BT=real, pair_labels_B=pairs)


@cache
def _separated(length: int) -> Batch:
    """The same with documents that begin anywhere, some with the last label: most rows have several, some only one."""
    tokens, labels = _samples(length)
    rng = np.random.default_rng(8)
    begins = rng.random(tokens.shape) < rng.choice([0.0, 0.05, 0.2], size=(NUM_SAMPLES, 1))
    rows, before = begins.nonzero()
    return build_batch(tokens, labels.copy(), (rows, before + 1))


class ToyMasked:
    num_samples = NUM_SAMPLES

    def __init__(self, length: int = SEQ_LEN) -> None:
        self.length = length

    def counts(self, sample_ids: Int64s) -> Counts:
        rows = self.batch(sample_ids)
        return Counts(int((rows.labels_BT != IGNORED).sum()), int(rows.not_padding_BT.sum()))

    def batch(self, sample_ids: Int64s) -> Batch:
        return _masked(self.length).map(lambda array: array[sample_ids])


class EvenlyMasked(ToyMasked):
    """One label in three, in every cut of every sequence."""

    share = 1 / 3

    def batch(self, sample_ids: Int64s) -> Batch:
        rows = super().batch(sample_ids)
        return replace(rows, labels_BT=np.where(np.arange(self.length) % 3 == 1, rows.tokens_BT, IGNORED))


class ToyData:
    num_samples = NUM_SAMPLES

    def __init__(self, length: int, *, documents: bool) -> None:
        self.length, self.documents = length, documents

    def counts(self, sample_ids: Int64s) -> Counts:
        labels = self.batch(sample_ids).labels_BT
        return Counts(int((labels != IGNORED).sum()), labels.size)

    def batch(self, sample_ids: Int64s) -> Batch:
        whole = _separated(self.length) if self.documents else Batch(*_samples(self.length))
        return whole.map(lambda array: array[sample_ids])


def data_of(case: Case, masked: type[ToyMasked] = ToyMasked) -> ToyData | ToyMasked:
    model = case.model_settings
    return ToyData(model.seq_len, documents=case.documents) if model.terms == ("lm",) else masked(model.seq_len)


def loader_of(case: Case, dp_index: int, masked: type[ToyMasked] = ToyMasked) -> Loader:
    return Loader(
        data_of(case, masked), ShuffledOrder(NUM_SAMPLES, seed=1), BatchPlan(case.global_batch), case.train.micro_batch,
        dp_index=dp_index, dp_size=case.dp,
    )  # fmt: skip
