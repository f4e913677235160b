"""The training data of a run: samples, order and validation samples, and the sources that its loss is divided by.

assemble_training_data.py builds `TrainingData`. The functions say which of many sources are shown, and how many tokens
and epochs are read of each; they are called by the records of training, by validation and by preflight. Torch-free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lmtrain.data.data_settings import REST, DataChoice
from lmtrain.data.resume_position_by_source import NOTHING_READ, DataHistory, MixtureOrder
from lmtrain.data.sample_dataset_interface import Dataset, OffsetOrder, SampleOrder
from lmtrain.data.samples.blend import BlendedDataset, BlendOrder
from lmtrain.data.samples.megatron_sample_order import MegatronBlendOrder
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.errors import join_few

MAX_SHOWN = 8  # sources that have values of their own in rows, curves and on the screen
_MAX_WARNED = 3  # sources that the warning on data.max_epochs names
_EXACT_SAMPLES = 1 << 18  # samples counted exactly (a second's work); the count of a longer run is extrapolated


@dataclass(frozen=True)
class TrainingPart:
    """A dataset's contribution to the training samples."""

    indexed: IndexedDataset
    documents: range
    tokens: range | None  # the tokens of the documents that are trained on; None: all of them
    dataset: Dataset
    share: Fraction  # share of the blend's samples; 1 for a single dataset
    name: str  # the name of its loss
    num_tokens: int  # tokens of the documents that are trained on

    @property
    def key(self) -> str:
        """The key of its tokens in a checkpoint: a digest of its content."""
        return self.indexed.content_digest


@dataclass(frozen=True)
class ValidationSource:
    """A dataset of the blend that validation reads."""

    name: str  # the name of its loss
    share: Fraction  # its part of the samples, in proportion to the other datasets


@dataclass(frozen=True)
class TrainingData:
    """The training samples with their order, the validation samples by domain, and facts about both."""

    train: Dataset
    order: SampleOrder
    valid: Mapping[str, Dataset]  # by domain; "" is a single unnamed domain, empty: no validation
    parts: list[TrainingPart]
    sample_identity: dict[str, Any]  # facts that decide which tokens the sample at each position has
    first_sample: int
    num_samples: int  # number of samples that the run reads
    pads: bool = False  # True if samples can be shorter than seq_len
    validation_note: str | None = None  # sentence: which part of the training datasets validation takes
    warning: str | None = None  # warning if validation takes far more than the requested share
    datasets: tuple[IndexedDataset, ...] = ()  # every dataset that training and validation read
    first_position: int = 0  # samples that the run has read before these
    history: DataHistory = NOTHING_READ  # the streams that are read, and where each of them begins
    valid_sources: tuple[ValidationSource, ...] = ()  # the datasets of a blend to validate on, in its order

    @property
    def content_sha256(self) -> str | None:
        """Content hash of the only training dataset, or a hash over the hashes of all of them; None if any has no .json
        sidecar.
        """
        hashes = [part.indexed.info.content_sha256 for part in self.parts if part.indexed.info]
        if len(hashes) < len(self.parts):
            return None
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()

    def contributions(self, seq_len: int) -> list[dict[str, Any]]:
        """Return one dict per training dataset: its size, and how many of its samples, tokens and epochs the run reads.
        `seq_len` is the number of tokens in a sample.
        """
        counts = self.samples_per_dataset(self.num_samples)
        tokens = self._tokens_per_dataset(counts) if self.pads else [count * seq_len for count in counts]
        return [
            {
                "dataset": str(part.indexed.prefix),
                "share": float(part.share),
                "documents": len(part.documents),
                "samples": part.dataset.num_samples,
                "run_samples": count,
                "run_tokens": in_run,
                "epochs": count / part.dataset.num_samples,
            }
            for part, count, in_run in zip(self.parts, counts, tokens, strict=True)
        ]

    def _tokens_per_dataset(self, run_samples: Sequence[int]) -> list[int]:
        """Return, per dataset, the number of tokens without padding that the run reads. `run_samples` is the number of
        samples that it reads of each.

        The first samples of the run are counted exactly; the rest is extrapolated in proportion.
        """
        ids = self.order.ids(self.first_position, min(self.num_samples, _EXACT_SAMPLES))
        if isinstance(self.train, BlendedDataset):
            counts = {part.number: (len(part.rows_S), part.tokens) for part in self.train.counts_by_dataset(ids)}
            exact = [counts.get(number, (0, 0)) for number in range(len(self.parts))]
        else:
            exact = [(len(ids), self.train.counts(ids).tokens)]
        mean = sum(tokens for _, tokens in exact) / len(ids)
        return [
            tokens + round((count - samples) * (tokens / samples if samples else mean))
            for count, (samples, tokens) in zip(run_samples, exact, strict=True)
        ]

    def samples_per_dataset(self, num_samples: int) -> list[int]:
        """Return, per training dataset, how many of the first `num_samples` samples come from it. Samples are counted
        from the beginning of the run or, if this is the data of a stage, of the stage.
        """
        if len(self.parts) == 1:
            return [num_samples]
        order = self.order.order if isinstance(self.order, OffsetOrder) else self.order
        assert isinstance(order, (BlendOrder, MegatronBlendOrder, MixtureOrder))
        start = self.first_position if isinstance(order, MixtureOrder) else self.first_sample
        before, after = (order.samples_before(start + count) for count in (0, num_samples))
        return [last - first for first, last in zip(before, after, strict=True)]


def shown_sources(sources: Sequence[TrainingPart] | Sequence[ValidationSource]) -> dict[str, list[int]]:
    """Return name -> indices in `sources` for a display that has one value per name: each of the sources with the
    largest shares has its own name, and all others together have the name "rest". Names are in the order of `sources`,
    "rest" is the last.
    """
    by_share = sorted(range(len(sources)), key=lambda index: -float(sources[index].share))
    shown = sorted(by_share[:MAX_SHOWN] if len(sources) > MAX_SHOWN + 1 else by_share)
    rest = sorted(set(by_share) - set(shown))
    return {sources[index].name: [index] for index in shown} | ({REST: rest} if rest else {})


def tokens_of_order(data: TrainingData, num_samples: int, num_tokens: int) -> dict[str, int]:
    """Return dataset key -> number of tokens read of it by a run that has read `num_samples` samples with `num_tokens`
    tokens in total, but did not count them per dataset: the tokens are divided in proportion to each dataset's samples,
    which is exact if all samples have equally many tokens. Only for a run without stages.
    """
    tokens: dict[str, int] = {}
    for part, count in zip(data.parts, data.samples_per_dataset(num_samples), strict=True):
        tokens[part.key] = tokens.get(part.key, 0) + num_tokens * count // max(num_samples, 1)
    return tokens


def tokens_at_end(
    data: TrainingData, seq_len: int, tokens_before: Mapping[str, int], samples_before: int = 0
) -> dict[str, int]:
    """Return dataset key -> number of tokens that the run will have read of it once it has read all samples of `data`,
    the data of the run or of one of its stages. `tokens_before` are these numbers after `samples_before` of the
    samples; `seq_len` is the number of tokens in a sample.
    """
    tokens = dict(tokens_before)
    counts_before = data.samples_per_dataset(samples_before)
    for part, facts, count_before in zip(data.parts, data.contributions(seq_len), counts_before, strict=True):
        to_read = facts["run_tokens"] * (facts["run_samples"] - count_before) // max(facts["run_samples"], 1)
        tokens[part.key] = tokens.get(part.key, 0) + to_read
    return tokens


def epoch_warnings(
    stages: Sequence[tuple[DataChoice, TrainingData, int]], tokens_before: Mapping[str, int], samples_before: int = 0
) -> Iterator[str]:
    """Yield one warning that names the datasets which the run will have read for more epochs than data.max_epochs;
    nothing if there are none. `stages` has (data settings, data, tokens in a sample) of the current stage and all later
    ones, or of the whole run; `tokens_before` and `samples_before` are as in `tokens_at_end`, for the first of them.
    """
    if all(settings.max_epochs is None for settings, _, _ in stages):
        return  # because: counting the tokens of padded samples takes a second
    limit, excess = float("inf"), dict[str, float]()
    for settings, data, seq_len in stages:
        tokens_before = tokens_at_end(data, seq_len, tokens_before, samples_before)
        samples_before = 0
        if settings.max_epochs is None:
            continue
        limit = min(limit, settings.max_epochs)
        for part in data.parts:
            epochs = tokens_before[part.key] / max(part.num_tokens, 1)
            if epochs > settings.max_epochs:
                excess[part.name] = epochs
    yield from excess_warnings(excess, limit)


def excess_warnings(epochs: Mapping[str, float], limit: float) -> Iterator[str]:
    """Yield one warning that names the datasets with more than `limit` epochs, which is the value of data.max_epochs;
    nothing if there are none. `epochs` has the number of epochs that the run reads by dataset name.
    """
    excess = {name: times for name, times in epochs.items() if times > limit}
    names = sorted(excess, key=lambda name: -excess[name])
    if names:
        sources = join_few((f"{name} for {excess[name]:.3g} epochs" for name in names), max_shown=_MAX_WARNED)
        yield (
            f"The run reads {sources}, which is more than data.max_epochs={limit:g}. Use more data, a shorter run or a "
            "smaller share of that data, or data.max_epochs=null for no limit."
        )
