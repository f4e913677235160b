"""A few hundred samples that a small model can learn, with labels ignored unevenly, read by the real loader."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import IGNORED, Batch
from lmtrain.data.batch_plan import BatchPlan
from lmtrain.data.dataset import Counts
from lmtrain.data.loader import Loader
from lmtrain.data.order import Order
from tests.layouts.cases import GLOBAL_BATCH, SEQ_LEN, VOCAB, Case

NUM_SAMPLES = 4 * GLOBAL_BATCH
Int64s = NDArray[np.int64]


@cache
def _samples() -> tuple[Int64s, Int64s]:
    """Tokens count up by a stride of the sample's own, with noise. A sample in seven has no label at all."""
    rng = np.random.default_rng(5)
    first, stride = rng.integers(VOCAB, size=(2, NUM_SAMPLES, 1))
    tokens = (first + stride * np.arange(SEQ_LEN + 1)) % VOCAB
    noise = rng.random(tokens.shape) < 0.1
    tokens[noise] = rng.integers(VOCAB, size=int(noise.sum()))
    labels = tokens[:, 1:].copy()
    labels[rng.random(labels.shape) < rng.random((NUM_SAMPLES, 1)) / 2] = IGNORED
    labels[np.arange(NUM_SAMPLES) % 7 == 3] = IGNORED
    return tokens[:, :-1].copy(), labels


@cache
def _masked() -> Batch:
    """The same as rows of two segments, cut at lengths of their own, with most labels' tokens hidden."""
    tokens, labels = _samples()
    rng = np.random.default_rng(6)
    at, lengths = np.arange(SEQ_LEN), rng.integers(6, SEQ_LEN + 1, size=(NUM_SAMPLES, 1))
    real = at < lengths
    labels = np.where(real, np.where(labels == IGNORED, IGNORED, tokens), IGNORED)
    hidden = (labels != IGNORED) & (rng.random(labels.shape) < 0.8)
    segments = ((at >= rng.integers(2, 5, size=lengths.shape)) & real).astype(np.int64)
    pairs = rng.integers(2, size=NUM_SAMPLES)
    # because: a pair that can be told from its tokens gives the head something to learn
    shown = np.where((pairs[:, None] == 1) & (segments == 1), tokens[:, ::-1], tokens)
    return Batch(np.where(hidden, 0, shown), labels, segments_BT=segments, real_BT=real, pair_labels_B=pairs)


class ToyMasked:
    num_samples = NUM_SAMPLES

    def counts(self, sample_ids: Int64s) -> Counts:
        rows = self.batch(sample_ids)
        return Counts(int((rows.labels_BT != IGNORED).sum()), int(rows.real_BT.sum()))

    def batch(self, sample_ids: Int64s) -> Batch:
        return _masked().map(lambda array: array[sample_ids])


class ToyData:
    num_samples = NUM_SAMPLES

    def counts(self, sample_ids: Int64s) -> Counts:
        labels = _samples()[1][sample_ids]
        return Counts(int((labels != IGNORED).sum()), labels.size)

    def batch(self, sample_ids: Int64s) -> Batch:
        tokens, labels = _samples()
        return Batch(tokens[sample_ids], labels[sample_ids])


def loader_of(case: Case, dp_index: int) -> Loader:
    data = ToyData() if case.model_settings.terms == ("lm",) else ToyMasked()
    return Loader(
        data, Order(NUM_SAMPLES, seed=1), BatchPlan(case.global_batch), case.train.micro_batch,
        dp_index=dp_index, dp_size=case.dp,
    )  # fmt: skip
