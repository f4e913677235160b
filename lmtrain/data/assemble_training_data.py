"""Builds from the data settings what a run reads: training samples, their order, and validation samples.

Called by preflight and by `lmtrain data`. Datasets are opened first, because the vocabulary size follows from them, and
cut into samples once it is known. Torch-free; must not know what the samples are used for.
"""

from __future__ import annotations

import hashlib
import json
import math
import resource
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from lmtrain.data.data_settings import (
    BlendPart,
    BlendSettings,
    DataChoice,
    DataSettings,
    MaskedSettings,
    source_names,
)
from lmtrain.data.dataset import Dataset, OffsetOrder, OrderedDataset, SampleOrder, ShuffledOrder, mix
from lmtrain.data.samples.blend import BlendedDataset, BlendOrder, MegatronBlendOrder, integer_shares
from lmtrain.data.samples.causal import CausalDataset
from lmtrain.data.samples.masked_language_samples import MaskedDataset, MaskingTokenizer, MaskVocabulary
from lmtrain.data.samples.megatron_sample_order import MegatronDataset, SequentialOrder, blend_sizes, split_sequences
from lmtrain.data.samples.packing import PackedDataset
from lmtrain.data.store.document_boundaries import DocumentMap, index_folder, record_path, split_documents, split_tokens
from lmtrain.data.store.index_cache import IndexCache
from lmtrain.data.store.indexed_dataset import IndexedDataset, dataset_file
from lmtrain.data.stream_history import KEY_DIGITS, NOTHING_READ, DataHistory, MixtureOrder
from lmtrain.errors import DataError, MissingInputError, SettingsError, StorageError, join_few
from lmtrain.observe.terminal_safe_text import warn

_EXACT_SAMPLES = 1 << 18  # samples counted exactly (a second's work); the count of a longer run is extrapolated
_FILES_EACH = 3  # because: .bin and .idx stay open under their memory maps, and a record of checksums may be a third
_OTHER_FILES = 48  # files that Python, torch and the run's own records hold open

# Rules for applying data.split. "tokens": the validation share is held out, counted in tokens. "read" (older): the
# same, counted in documents. "all" (oldest): every share but the first is held out, whether anything reads it or not.
# A resumed run keeps the rule it began with.
TOKEN_SHARES, READ_SHARES, ALL_SHARES = SHARES = "tokens", "read", "all"
_WARN_FACTOR = 2  # times the requested share of validation, above which a warning is given


@dataclass(frozen=True)
class OpenDatasets:
    """The datasets that the settings name, before they are cut into samples."""

    train: list[IndexedDataset]
    valid: list[IndexedDataset]  # empty: validation reads a part of each dataset in `train`

    @property
    def datasets(self) -> list[IndexedDataset]:
        """The datasets of `train`, then those of `valid`."""
        return self.train + self.valid


@dataclass(frozen=True)
class DataRequirements:
    """The requirements of a run on its data, beyond the data settings: sample length, seed, number of samples."""

    seq_len: int
    vocab_size: int
    seed: int
    num_samples: int  # samples of the whole run, or of a stage
    validate: bool
    tokenizer: MaskingTokenizer | None = None  # for masked samples only
    shares: str = TOKEN_SHARES  # an entry of SHARES
    first_position: int = 0  # samples that the run has read before the stage for which the data is built
    history: DataHistory = NOTHING_READ  # what the run has read before; of a stage that is resumed, its own


@dataclass(frozen=True)
class TrainingPart:
    """A dataset's contribution to the training samples."""

    indexed: IndexedDataset
    documents: range
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
        train = self.train
        if isinstance(train, BlendedDataset):
            counts = {part.number: (len(part.rows_S), part.tokens) for part in train.counts_by_dataset(ids)}
            exact = [counts.get(number, (0, 0)) for number in range(len(self.parts))]
        else:
            exact = [(len(ids), train.counts(ids).tokens)]
        mean = sum(tokens for _, tokens in exact) / len(ids)
        return [
            tokens + round((count - samples) * (tokens / samples if samples else mean))
            for count, (samples, tokens) in zip(run_samples, exact, strict=True)
        ]

    def samples_per_dataset(self, num_samples: int) -> list[int]:
        """Return, per training dataset, how many of the first `num_samples` samples of the run are its own; of a stage,
        of the samples that it begins with.
        """
        if len(self.parts) == 1:
            return [num_samples]
        order = self.order.order if isinstance(self.order, OffsetOrder) else self.order
        assert isinstance(order, (BlendOrder, MegatronBlendOrder, MixtureOrder))
        start = self.first_position if isinstance(order, MixtureOrder) else self.first_sample
        before, after = (order.samples_before(start + count) for count in (0, num_samples))
        return [last - first for first, last in zip(before, after, strict=True)]


def open_datasets(settings: DataChoice) -> OpenDatasets:
    """Open all training and validation datasets that the data settings name. Raise SettingsError if data.kind is not
    dataset, blend or masked.
    """
    if isinstance(settings, DataSettings):
        paths, valid_paths = [settings.path], [settings.valid_path] if settings.valid_path else []
        if settings.text is not None and not dataset_file(Path(settings.path), ".idx").is_file():
            raise MissingInputError(
                f"{settings.path} is not made yet: a run makes it of data.text={settings.text} before its first step. "
                "Start `lmtrain pretrain` with these settings, or give data.path=PREFIX of a dataset instead."
            )
    elif isinstance(settings, BlendSettings):
        paths, valid_paths = ([part.path for part in parts] for parts in (settings.datasets, settings.valid_datasets))
    else:
        raise SettingsError([f"data.kind={settings.kind} is not read from datasets. Use dataset, blend or masked."])
    valid_paths += settings.valid_paths.values()
    _raise_file_limit(_FILES_EACH * (len(paths) + len(valid_paths)))
    return OpenDatasets(*([IndexedDataset.open(path) for path in prefixes] for prefixes in (paths, valid_paths)))


def build_training_data(settings: DataChoice, opened: OpenDatasets, requirements: DataRequirements) -> TrainingData:
    """Build the training samples, their order and the validation samples from opened datasets, as the data settings and
    the run's requirements say.

    Raise SettingsError or DataError if the data is too small or the settings do not fit it.
    """
    builder = _DatasetBuilder(settings, requirements, reads_valid=len(opened.valid) == 0)
    for indexed in opened.datasets:
        indexed.set_verification(settings.verify, record_path(indexed, builder.index_folder(indexed)), warn)
    least_samples = settings.first_sample + requirements.num_samples
    run_samples = settings.megatron_samples or least_samples
    if run_samples < least_samples:
        raise SettingsError([
            f"data.megatron_samples={run_samples} is less than data.first_sample={settings.first_sample} plus the "
            f"{requirements.num_samples} samples of this run. Give the number of samples of Megatron-LM's whole run."
        ])
    valid = builder.build_domains(opened.valid) if requirements.validate else {}
    held_out, validation_note, warning, tail = 0, None, None, None
    valid_sources: tuple[ValidationSource, ...] = ()
    if requirements.validate and not opened.valid:
        validation_note, warning = _describe_held_out(builder, opened.train)
    if isinstance(settings, BlendSettings):
        train, order, parts = _build_blend(settings, builder, opened.train, run_samples)
        if requirements.validate and not valid:
            valid_blend, valid_sources = _build_valid_blend(settings, builder, opened)
            valid = {"": valid_blend}
    else:
        [indexed] = opened.train
        documents = builder.training_range(indexed)
        tail = _hold_out_tail(builder, opened) if requirements.validate else None
        tokens = builder.training_tokens(indexed, documents, None if tail is None else tail.train_tokens)
        train = builder.build_dataset(indexed, documents, run_samples, tokens)
        order = builder.build_order(train)
        num_tokens = builder.count_tokens(indexed, documents) if tokens is None else len(tokens)
        parts = [TrainingPart(indexed, documents, train, Fraction(1), Path(indexed.prefix).name, num_tokens)]
        if tail is not None:
            valid, held_out = {"": builder.build_dataset(indexed, documents, None, tail.tokens)}, len(tail.tokens)
            validation_note, warning = tail.describe(documents, indexed), _excess_warning(builder, indexed, held_out)
        elif requirements.validate and not valid:
            valid = {"": _build_valid_dataset(builder, opened)}
    # because: Megatron-LM's order is of a whole run, which has no stages and so no history
    history = NOTHING_READ if builder.megatron else _continue_history(
        builder, parts, tail, opened.valid if requirements.validate else []
    )  # fmt: skip
    if requirements.history.streams and not builder.megatron:
        orders = [
            builder.build_order(part.dataset, history.states[key].seed)
            for key, part in zip(history.streams, parts, strict=True)
        ]
        order = MixtureOrder(history, orders, [part.dataset.num_samples for part in parts])
    elif settings.first_sample:
        order = OffsetOrder(order, settings.first_sample)
    warning = warning or _trained_before_warning(builder, opened)
    sample_identity = _sample_identity(settings, parts, run_samples) | {"held_out_tokens": held_out}
    sample_identity |= {"shares": builder.shares} if builder.shares != ALL_SHARES else {}
    return TrainingData(
        train, order, valid, parts, sample_identity, settings.first_sample, requirements.num_samples,
        pads=settings.packing != "concatenate" or isinstance(settings, MaskedSettings), validation_note=validation_note,
        warning=warning, datasets=tuple(opened.datasets), first_position=requirements.first_position, history=history,
        valid_sources=valid_sources,
    )  # fmt: skip


class _DatasetBuilder:
    """Builder of sample datasets from document ranges, according to the settings."""

    def __init__(self, settings: DataChoice, requirements: DataRequirements, *, reads_valid: bool) -> None:
        """Set up the builder. `reads_valid`: whether validation would read a share of the training datasets."""
        self.settings, self.requirements = settings, requirements
        self.megatron = settings.order == "megatron"
        # because: with Megatron-LM's order every share must be cut where Megatron-LM cuts it, even if nothing reads it
        self.shares = ALL_SHARES if self.megatron else requirements.shares
        self.split = settings.split[: 3 if self.shares == ALL_SHARES else 2 if reads_valid else 1]
        self.share = self.split[1] / sum(self.split) if len(self.split) > 1 else 0.0
        masked = isinstance(settings, MaskedSettings)
        self.by_sequence = self.megatron and not masked
        self.is_concatenated = not self.megatron and not masked and settings.packing == "concatenate"
        # because: concatenated text can be cut within a document, and a blend has other datasets to validate on
        self.min_documents = 0 if self.is_concatenated or isinstance(settings, BlendSettings) else 1

    @cached_property
    def vocabulary(self) -> MaskVocabulary:
        """The tokenizer's vocabulary, for masked samples only."""
        assert self.requirements.tokenizer is not None, "masked samples need a tokenizer"
        return MaskVocabulary.of(self.requirements.tokenizer)

    def index_folder(self, indexed: IndexedDataset) -> Path:
        return index_folder(indexed, self.settings.index_dir)

    def cache(self, indexed: IndexedDataset) -> IndexCache:
        return IndexCache(self.index_folder(indexed))

    def split_ranges(self, indexed: IndexedDataset) -> Sequence[range]:
        """Return the document ranges of a dataset for training, for validation and, in some cases, a third one that is
        not used. For Megatron-LM's concatenated text the ranges are of sequences.
        """
        if self.megatron:
            return split_sequences(len(self.full_range(indexed)), self.split)
        if self.shares != TOKEN_SHARES or not self.share:
            return split_documents(indexed.num_documents, self.split)
        return split_tokens(DocumentMap.of(indexed, self.cache(indexed)), self.share, self.min_documents)

    def full_range(self, indexed: IndexedDataset) -> range:
        """Return the whole range to split: sequences for Megatron-LM's concatenated text, documents otherwise."""
        return range(indexed.num_sequences if self.by_sequence else indexed.num_documents)

    def count_tokens(self, indexed: IndexedDataset, documents: range) -> int:
        """Return the number of tokens in a range of documents (of sequences for Megatron-LM's concatenated text)."""
        if documents == self.full_range(indexed):
            return indexed.num_tokens
        if self.by_sequence:
            return int(indexed.lengths[documents.start : documents.stop].sum())
        map_ = DocumentMap.of(indexed, self.cache(indexed))
        return map_.start(documents.stop) - map_.start(documents.start)

    def build_domains(self, valid: Sequence[IndexedDataset]) -> dict[str, Dataset]:
        """Return the samples for each domain of data.valid_paths, by domain name: all documents of its dataset in
        `valid`. Empty if data.valid_paths is not set.
        """
        paths = self.settings.valid_paths
        named = zip(paths, valid if paths else (), strict=True)
        return {name: self.build_dataset(indexed, self.full_range(indexed), None) for name, indexed in named}

    def training_range(self, indexed: IndexedDataset) -> range:
        """Return the documents of a dataset to train on: those of `split_ranges`, without the ones that an earlier
        stage of the run held out. Raise SettingsError if an earlier stage validated on this dataset.
        """
        documents, history = self.split_ranges(indexed)[0], self.requirements.history
        if self.settings.train_on_held_out:
            return documents
        content = indexed.content_digest[:KEY_DIGITS]
        if content in history.validated:
            raise SettingsError([
                f"{indexed.prefix} was validated on in an earlier stage of this run, so training on it would make that "
                "loss meaningless. Leave it out, or add data.train_on_held_out=true."
            ])
        stop = min(documents.stop, history.held_out.get(content, documents.stop))
        held_out_token = history.held_out_tokens.get(content)
        if held_out_token is not None and not self.is_concatenated:
            # because: other samples are of whole documents, so the one that was cut is left out
            start_of = DocumentMap.of(indexed, self.cache(indexed)).start
            stop = documents.start - 1 + bisect_right(
                range(documents.start, stop + 1), held_out_token, key=start_of
            )  # fmt: skip
        if documents and stop <= documents.start:
            raise SettingsError([
                f"All of {indexed.prefix} that this stage would train on was held out for validation by an earlier "
                "stage of this run. Leave it out, or add data.train_on_held_out=true."
            ])
        return range(documents.start, stop)

    def training_tokens(self, indexed: IndexedDataset, documents: range, tokens: range | None = None) -> range | None:
        """Return the tokens of these documents to train on, None for all: `tokens`, if given, without those at the end
        of the dataset that an earlier stage of the run held out.
        """
        held_out = self.requirements.history.held_out_tokens.get(indexed.content_digest[:KEY_DIGITS])
        if held_out is None or self.settings.train_on_held_out:
            return tokens
        if tokens is not None:
            return range(tokens.start, min(tokens.stop, held_out))
        return range(DocumentMap.of(indexed, self.cache(indexed)).start(documents.start), held_out)

    def build_order(self, dataset: Dataset, seed: int | None = None) -> SampleOrder:
        """Return the order in which training reads a dataset's samples. `seed` is that of its stream, by default the
        run's.
        """
        seed = self.requirements.seed if seed is None else seed
        if isinstance(dataset, MaskedDataset):
            return dataset.order(seed)
        if self.megatron:
            return SequentialOrder(dataset.num_samples)
        return ShuffledOrder(dataset.num_samples, seed)

    def build_dataset(
        self, indexed: IndexedDataset, documents: range, num_samples: int | None, tokens: range | None = None
    ) -> Dataset:
        """Return the samples of these documents of a dataset, of the kind that the data settings choose: masked,
        Megatron-LM's, concatenated or packed. `num_samples` is for Megatron-LM's order only (None: one epoch); `tokens`
        restricts concatenated samples to a range of the dataset's tokens.

        A token range is given for documents that are split between training and validation.
        """
        settings, seq_len, vocab_size = self.settings, self.requirements.seq_len, self.requirements.vocab_size
        mask, cache = settings.document_mask, self.cache(indexed)
        if isinstance(settings, MaskedSettings):
            return MaskedDataset(
                indexed, documents, seq_len, self.vocabulary, settings, self.requirements.seed, num_samples, cache
            )  # fmt: skip
        if self.megatron:
            return MegatronDataset(
                indexed, documents, seq_len, num_samples, self.requirements.seed, mask, vocab_size, cache
            )  # fmt: skip
        if settings.packing == "concatenate":
            return CausalDataset(indexed, documents, seq_len, mask, vocab_size, cache, tokens)
        return PackedDataset(indexed, documents, seq_len, settings.packing, mask, vocab_size, cache)


def _build_blend(
    settings: BlendSettings, builder: _DatasetBuilder, opened: Sequence[IndexedDataset], run_samples: int
) -> tuple[Dataset, SampleOrder, list[TrainingPart]]:
    """Return (training samples of all datasets, their order, a TrainingPart per dataset) of a blend. `run_samples` is
    the number of samples of the run, for Megatron-LM's order.
    """
    ranges = [builder.training_range(indexed) for indexed in opened]
    tokens = list(map(builder.training_tokens, opened, ranges))
    if builder.megatron:
        weights = [part.weight or 0.0 for part in settings.datasets]
        counts, requested = blend_sizes(weights, run_samples)
        sets = [builder.build_dataset(*part) for part in zip(opened, ranges, requested, strict=True)]
        total = sum(map(Fraction, weights), Fraction())
        shares = [Fraction(weight) / total for weight in weights]
        order: SampleOrder = MegatronBlendOrder(weights, [dataset.num_samples for dataset in sets], sum(counts))
    else:
        sets = [
            builder.build_dataset(indexed, documents, None, part)
            for indexed, documents, part in zip(opened, ranges, tokens, strict=True)
        ]
        whole_shares = _dataset_shares(settings.datasets, sets, builder.requirements.seq_len)
        shares = [Fraction(share, sum(whole_shares)) for share in whole_shares]
        order = BlendOrder(whole_shares, [dataset.num_samples for dataset in sets], builder.requirements.seed)
    num_tokens = [
        builder.count_tokens(indexed, documents) if part is None else len(part)
        for indexed, documents, part in zip(opened, ranges, tokens, strict=True)
    ]
    names = source_names(settings.datasets)
    parts = [TrainingPart(*part) for part in zip(opened, ranges, sets, shares, names, num_tokens, strict=True)]
    return BlendedDataset(sets), order, parts


def _dataset_shares(parts: Sequence[BlendPart], sets: Sequence[Dataset], seq_len: int) -> list[int]:
    """Return an integer per dataset in proportion to the samples it gives to a blend. A weight counts as it is; tokens
    and epochs are converted to samples. `parts` are the settings of the datasets, `sets` their samples.
    """
    return integer_shares([
        part.weight if part.weight is not None
        else Fraction(part.tokens, seq_len) if part.tokens is not None
        else Fraction(repr(part.epochs)) * dataset.num_samples
        for part, dataset in zip(parts, sets, strict=True)
    ])  # fmt: skip


def _continue_history(
    builder: _DatasetBuilder, parts: Sequence[TrainingPart], tail: _HeldOutTail | None, valid: Sequence[IndexedDataset]
) -> DataHistory:
    """Return the run's history with this stage begun: its streams, and what it holds out for validation."""
    settings, requirements = builder.settings, builder.requirements
    keys: list[str] = []
    for part in parts:
        key = _stream_key(builder, part, tail)
        keys.append(f"{key} #{keys.count(key) + 1}" if key in keys else key)
    restarts = _restarts(settings)
    if any(restarts) and len({key.partition(" #")[0] for key in keys}) < len(keys):
        raise SettingsError([
            "data.datasets lists datasets of equal content, one of them with restart=true, so it is not clear where "
            "their common samples begin. List each content once."
        ])
    unit = math.lcm(*(part.share.denominator for part in parts))
    shares = [int(part.share * unit) for part in parts]  # because: exactly those by which a run's first mixture is read
    seed, is_blend = requirements.seed, isinstance(settings, BlendSettings)
    first_seeds = [mix(seed) + 1 + d for d in range(len(parts))] if is_blend else [seed]
    history = requirements.history.begin(
        requirements.first_position, keys, shares, first_seeds, restarts, run_seed=seed,
        skipped=0 if requirements.history.streams else settings.first_sample,
    )  # fmt: skip
    held_out = {
        part.indexed.content_digest[:KEY_DIGITS]: part.documents.stop for part in parts
        if part.documents.stop < len(builder.full_range(part.indexed))
    }  # fmt: skip
    tokens = {} if tail is None else {parts[0].indexed.content_digest[:KEY_DIGITS]: tail.train_tokens.stop}
    trained = {part.indexed.content_digest for part in parts}  # may also be validated on, if the settings say so
    validated = [indexed.content_digest[:KEY_DIGITS] for indexed in valid if indexed.content_digest not in trained]
    return history.with_held_out(held_out, tokens, validated)


def _restarts(settings: DataChoice) -> list[bool]:
    """Return, for each training dataset, whether the settings say that it begins at its first sample again."""
    if isinstance(settings, BlendSettings):
        return [part.restart for part in settings.datasets]
    return [isinstance(settings, DataSettings) and settings.restart]


def _trained_before_warning(builder: _DatasetBuilder, opened: OpenDatasets) -> str | None:
    """Return a warning if validation reads documents that an earlier stage of the run trained on, else None."""
    history = builder.requirements.history
    if not builder.requirements.validate or not history.states:
        return None
    starts = [(indexed, 0) for indexed in opened.valid]
    if not opened.valid and builder.share:
        starts = [(indexed, builder.split_ranges(indexed)[1].start) for indexed in opened.train]
    names = [
        str(indexed.prefix) for indexed, start in starts
        if history.end_of_trained_documents(indexed.content_digest[:KEY_DIGITS]) > start
    ]  # fmt: skip
    if not names:
        return None
    return (
        f"validation reads documents of {join_few(names)} that an earlier stage of this run trained on, so its loss "
        "says little about new text. Validate on other data, or keep data.split the same in all stages."
    )


def _stream_key(builder: _DatasetBuilder, part: TrainingPart, tail: _HeldOutTail | None) -> str:
    """Return the key of a stream: everything that decides which samples it has."""
    settings, documents = builder.settings, part.documents
    kind = settings.packing if not isinstance(settings, MaskedSettings) else hashlib.sha256(
        json.dumps(settings.sample_identity, sort_keys=True).encode()
    ).hexdigest()[:KEY_DIGITS]
    tokens = builder.training_tokens(part.indexed, documents, None if tail is None else tail.train_tokens)
    words = [part.indexed.content_digest[:KEY_DIGITS], str(builder.requirements.seq_len), kind]
    words += [f"documents {documents.start}-{documents.stop}"]
    words += [] if tokens is None else [f"tokens {tokens.start}-{tokens.stop}"]
    return " ".join(words)


@dataclass(frozen=True)
class _HeldOutTail:
    """Cut between the tokens to train on and the last tokens, held out, of a dataset with too few documents to split.
    """

    train_tokens: range
    tokens: range  # tokens held out for validation

    def describe(self, documents: range, indexed: IndexedDataset) -> str:
        """Return a note for the user: how many tokens of a dataset are held out for validation. `documents` are the
        documents they are taken from.
        """
        few = "its only document" if len(documents) == 1 else f"its {len(documents)} documents"
        held_out, total = len(self.tokens), len(self.train_tokens) + len(self.tokens)
        return (
            f"the last {held_out:,} of {total:,} tokens of {indexed.prefix} ({held_out / total:.1%}), "
            f"from the end of {few}, which are not trained on"
        )


def _hold_out_tail(builder: _DatasetBuilder, opened: OpenDatasets) -> _HeldOutTail | None:
    """Return where to cut the last tokens off the training documents for validation, if data.split's validation share
    rounds to no document; else None.

    Validation gets that share of the tokens, at least one sample. Raise DataError if there are not two samples.
    """
    [indexed] = opened.train
    documents, held_out = builder.split_ranges(indexed)[:2]
    if opened.valid or held_out or not documents or not builder.share or not builder.is_concatenated:
        return None
    map_ = DocumentMap.of(indexed, builder.cache(indexed))
    first, last, min_tokens = map_.start(documents.start), map_.start(documents.stop), builder.requirements.seq_len + 1
    cut_token = last - max(round((last - first) * builder.share), min_tokens)
    if cut_token - first < min_tokens:
        raise DataError(
            f"{indexed.prefix} has {last - first} tokens, too few for two samples of "
            f"{builder.requirements.seq_len}, one to train on and one to validate on. Use more text, a smaller "
            "model.seq_len, data.valid_path=PREFIX, or train.valid_interval_steps=0."
        )
    return _HeldOutTail(range(first, cut_token), range(cut_token, last))


def _describe_held_out(builder: _DatasetBuilder, opened: Sequence[IndexedDataset]) -> tuple[str | None, str | None]:
    """Return (note, warning) for the user about the documents of the training datasets that validation takes: how many
    tokens they have, and a warning if these are far more than data.split requests. Each is None if there is nothing to
    report.
    """
    parts = [(indexed, builder.split_ranges(indexed)[1]) for indexed in opened]
    held_out_of = {indexed: builder.count_tokens(indexed, documents) for indexed, documents in parts if builder.share}
    if not (held_out := sum(held_out_of.values())):
        return None, None
    tokens = sum(builder.count_tokens(indexed, builder.full_range(indexed)) for indexed in opened)
    name = str(opened[0].prefix) if len(opened) == 1 else f"{len(opened)} datasets"
    note = f"{held_out:,} of {tokens:,} tokens of {name} ({held_out / tokens:.1%}), which are not trained on"
    if without := [str(indexed.prefix) for indexed, documents in parts if not _has_sample(builder, indexed, documents)]:
        note += f"; {join_few(without)} {'has' if len(without) == 1 else 'have'} no document to hold out"
    warnings = (_excess_warning(builder, indexed, num_tokens) for indexed, num_tokens in held_out_of.items())
    return note, next(filter(None, warnings), None)


def _excess_warning(builder: _DatasetBuilder, indexed: IndexedDataset, held_out: int) -> str | None:
    """Return a warning if `held_out`, the number of a dataset's tokens that validation takes, is more than _WARN_FACTOR
    times the share that data.split requests; else None.
    """
    share = held_out / max(builder.count_tokens(indexed, builder.full_range(indexed)), 1)
    if share <= _WARN_FACTOR * builder.share:
        return None
    return (
        f"validation takes {share:.1%} of the tokens of {indexed.prefix}, but data.split asks for {builder.share:.1%}. "
        "More text, shorter documents or data.valid_path=PREFIX leave more to train on."
    )


def _build_valid_dataset(builder: _DatasetBuilder, opened: OpenDatasets) -> Dataset:
    """Return the validation samples for a single training dataset: all of data.valid_path if it is set, else the
    dataset's validation documents. Raise SettingsError if there are none.
    """
    if opened.valid:
        return builder.build_dataset(opened.valid[0], builder.full_range(opened.valid[0]), None)
    documents = builder.split_ranges(opened.train[0])[1]
    if len(documents) == 0:
        raise _no_validation_error(builder, opened, alternative="data.valid_path=PREFIX")
    return builder.build_dataset(opened.train[0], documents, None)


def _build_valid_blend(
    settings: BlendSettings, builder: _DatasetBuilder, opened: OpenDatasets
) -> tuple[Dataset, tuple[ValidationSource, ...]]:
    """Return validation samples of several datasets, mixed in the blend's proportions until the first dataset runs out:
    of data.valid_datasets if set, else of the training datasets' validation documents. Return also the name and the
    share of each dataset, in the order of the blend.
    """
    if opened.valid:
        parts = settings.valid_datasets
        documents_of = [(indexed, builder.full_range(indexed)) for indexed in opened.valid]
    else:
        parts = settings.datasets
        documents_of = [(indexed, builder.split_ranges(indexed)[1]) for indexed in opened.train]
    sets, kept_parts, names = [], [], []
    for part, name, (indexed, documents) in zip(parts, source_names(parts), documents_of, strict=True):
        if opened.valid or _has_sample(builder, indexed, documents):  # a small dataset may give no sample
            sets.append(builder.build_dataset(indexed, documents, None))
            kept_parts.append(part)
            names.append(name)
    if not sets:
        raise _no_validation_error(builder, opened, alternative="data.valid_datasets=[...]")
    shares = _dataset_shares(kept_parts, sets, builder.requirements.seq_len)
    num_samples = min(dataset.num_samples * sum(shares) // share for dataset, share in zip(sets, shares, strict=True))
    order = BlendOrder(shares, [dataset.num_samples for dataset in sets], builder.requirements.seed, shuffled=False)
    sources = (ValidationSource(*source) for source in zip(names, map(Fraction, shares), strict=True))
    return OrderedDataset(BlendedDataset(sets), order, max(num_samples, 1)), tuple(sources)


def _has_sample(builder: _DatasetBuilder, indexed: IndexedDataset, documents: range) -> bool:
    """Return True if these documents of a dataset have enough tokens for at least one sample."""
    if len(documents) == 0:
        return False
    tokens = builder.count_tokens(indexed, documents)
    is_cut = builder.megatron or builder.settings.packing == "concatenate"
    return tokens > (builder.requirements.seq_len if is_cut else len(documents))


def _no_validation_error(builder: _DatasetBuilder, opened: OpenDatasets, alternative: str) -> SettingsError:
    """Return the error for training data that has no document left to validate on. `alternative` is a setting that its
    message suggests, such as data.valid_path=PREFIX.
    """
    if all(indexed.num_documents == 1 for indexed in opened.train):
        name = str(opened.train[0].prefix) if len(opened.train) == 1 else "Each dataset"
        return SettingsError([
            f"{name} has only one document, so none is left to validate on. Preprocess text with a document in each "
            f"line (.jsonl) or file, or set {alternative} or train.valid_interval_steps=0."
        ])
    return SettingsError([
        f"data.split={list(builder.settings.split)} leaves no document to validate on. Give the second part a larger "
        f"share, set {alternative}, or train.valid_interval_steps=0."
    ])


def _sample_identity(settings: DataChoice, parts: Sequence[TrainingPart], run_samples: int) -> dict[str, Any]:
    """Return the facts that decide which tokens the sample at each position of the run has, such as packing, order and
    token counts. A resumed run must have the same facts.
    """
    facts: dict[str, Any] = {
        "num_documents": sum(part.indexed.num_documents for part in parts),
        "num_tokens": sum(part.indexed.num_tokens for part in parts),
        "train_documents": [parts[0].documents.start, parts[-1].documents.stop],
        "document_mask": settings.document_mask,
        "packing": settings.packing,
        "order": settings.order if settings.order == "own" else f"megatron for {run_samples} samples",
        "first_sample": settings.first_sample,
        "blend": None,
        "restart": restarts if any(restarts := _restarts(settings)) else None,
    }
    if isinstance(settings, MaskedSettings):
        facts |= settings.sample_identity
    if len(parts) > 1:
        part_facts = [
            [part.documents.start, part.documents.stop, part.indexed.num_documents, part.indexed.num_tokens,
             str(part.share), part.indexed.info.content_sha256 if part.indexed.info else None]
            for part in parts
        ]  # fmt: skip
        facts["blend"] = f"{len(parts)} datasets, {hashlib.sha256(json.dumps(part_facts).encode()).hexdigest()[:12]}"
    return facts


def _raise_file_limit(num_files: int) -> None:
    """Raise this process's soft limit on open files if it is too low for `num_files` data files: a blend of many
    datasets exceeds the default of many systems.

    Raise StorageError if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files + 512 <= soft or soft == resource.RLIM_INFINITY:
        return
    limit = num_files + 512 if hard == resource.RLIM_INFINITY else min(num_files + 512, hard)
    if num_files + _OTHER_FILES > limit:
        or_merge_datasets = " or merge some of the datasets" if num_files > 2 * _FILES_EACH else ""
        raise StorageError(
            f"A process may open {hard} files here, but this data needs {num_files} and the rest of the run about "
            f"{_OTHER_FILES}. Raise the limit (`ulimit -Hn`, or LimitNOFILE of a service){or_merge_datasets}."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, soft), hard))
