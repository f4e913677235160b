"""Builds from the data settings what a run reads: training samples, their order, and validation samples.

Called by preflight and by `lmtrain data`. Datasets are opened first, because the vocabulary size follows from them, and
cut into samples once it is known. Torch-free; must not know what the samples are used for.
"""

from __future__ import annotations

import hashlib
import json
import math
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from lmtrain.config.settings_base import show
from lmtrain.data.cut_datasets_into_samples import ALL_SHARES, DataRequirements, DatasetBuilder
from lmtrain.data.data_settings import (
    BlendPart,
    BlendSettings,
    DataChoice,
    DataSettings,
    MaskedSettings,
    source_names,
)
from lmtrain.data.refuse_text_as_dataset import refuse_text_as_dataset
from lmtrain.data.resume_position_by_source import KEY_DIGITS, NOTHING_READ, DataHistory, HeldOut, MixtureOrder
from lmtrain.data.sample_dataset_interface import Dataset, OffsetOrder, OrderedDataset, SampleOrder
from lmtrain.data.samples.blend import BlendedDataset, BlendOrder, FileOrder, blend_seeds, integer_shares
from lmtrain.data.samples.megatron_sample_order import MegatronBlendOrder, blend_sizes
from lmtrain.data.store.cut_one_text import finer_split
from lmtrain.data.store.document_boundaries import record_path
from lmtrain.data.store.indexed_dataset import IndexedDataset, dataset_file
from lmtrain.data.store.joined_dataset import open_dataset, shard_prefixes
from lmtrain.data.training_data_by_source import TrainingData, TrainingPart, ValidationSource
from lmtrain.errors import DataError, MissingInputError, SettingsError, StorageError, join_few, way
from lmtrain.runtime.terminal_safe_text import warn

_FILES_EACH = 3  # because: .bin and .idx stay open under their memory maps, and a record of checksums may be a third
_OTHER_FILES = 48  # files that Python, torch and the run's own records hold open
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


def open_datasets(settings: DataChoice) -> OpenDatasets:
    """Open all training and validation datasets that the data settings name. Raise SettingsError if data.kind is not
    dataset, blend or masked.
    """
    refuse_text_as_dataset(settings)
    if isinstance(settings, DataSettings):
        paths, valid_paths = [settings.path], [settings.valid_path] if settings.valid_path else []
        if settings.text is not None and not dataset_file(Path(settings.path), ".idx").is_file():
            raise MissingInputError(
                f"{settings.path} is not made yet: a run makes it of data.text={show(settings.text)} before its first "
                "step. Start `lmtrain pretrain` with these settings, or give data.path=PREFIX of a dataset instead."
            )
    elif isinstance(settings, BlendSettings):
        paths, valid_paths = ([part.path for part in parts] for parts in (settings.datasets, settings.valid_datasets))
    else:
        raise SettingsError([f"data.kind={settings.kind} is not read from datasets. Choose dataset, blend or masked."])
    valid_paths += settings.valid_paths.values()
    num_datasets = sum(max(len(shard_prefixes(Path(path))), 1) for path in [*paths, *valid_paths])
    _raise_file_limit(_FILES_EACH * num_datasets)
    return OpenDatasets(*([open_dataset(path) for path in prefixes] for prefixes in (paths, valid_paths)))


def build_training_data(settings: DataChoice, opened: OpenDatasets, requirements: DataRequirements) -> TrainingData:
    """Build TrainingData from opened datasets: the samples to train on, the order in which they are read, and the
    samples to validate on. `settings` choose datasets, split and packing; `requirements` are what the run needs, such
    as the number of samples.

    Raise SettingsError or DataError if the data is too small or the settings do not fit it.
    """
    builder = DatasetBuilder(settings, requirements, reads_valid=len(opened.valid) == 0)
    for indexed in opened.datasets:
        for shard in indexed.shards:
            shard.set_verification(settings.verify, record_path(shard, builder.index_folder(indexed)), warn)
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
        parts = [TrainingPart(indexed, documents, tokens, train, Fraction(1), indexed.prefix.name, num_tokens)]
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


def _build_blend(
    settings: BlendSettings, builder: DatasetBuilder, opened: Sequence[IndexedDataset], run_samples: int
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
        orders = map(builder.build_order, sets, blend_seeds(builder.requirements.seed, len(sets)))
        order = BlendOrder(whole_shares, [dataset.num_samples for dataset in sets], list(orders))
    num_tokens = [
        builder.count_tokens(indexed, documents) if part is None else len(part)
        for indexed, documents, part in zip(opened, ranges, tokens, strict=True)
    ]
    names = source_names(settings.datasets)
    facts = zip(opened, ranges, tokens, sets, shares, names, num_tokens, strict=True)
    return BlendedDataset(sets), order, [TrainingPart(*part) for part in facts]


def _dataset_shares(parts: Sequence[BlendPart], sets: Sequence[Dataset], seq_len: int) -> list[int]:
    """Return one positive integer per dataset of a blend, in proportion to the number of samples that it contributes. A
    `weight` in the settings is used as it is, `tokens` are divided by seq_len, and `epochs` are multiplied by the
    number of samples of the dataset. `parts` are the settings of the datasets, `sets` their samples.
    """
    return integer_shares([
        part.weight if part.weight is not None
        else Fraction(part.tokens, seq_len) if part.tokens is not None
        else Fraction(repr(part.epochs)) * dataset.num_samples
        for part, dataset in zip(parts, sets, strict=True)
    ])  # fmt: skip


def _continue_history(
    builder: DatasetBuilder, parts: Sequence[TrainingPart], tail: _HeldOutTail | None, valid: Sequence[IndexedDataset]
) -> DataHistory:
    """Return the run's DataHistory at the beginning of this stage, with the datasets in `parts` that it trains on and
    the documents or tokens that it holds out for validation. `tail` is the result of `_hold_out_tail`, `valid` are the
    opened datasets for validation only. Raise SettingsError if two datasets have equal content and one has
    restart=true.
    """
    settings, requirements = builder.settings, builder.requirements
    keys: list[str] = []
    for part in parts:
        key = _stream_key(builder, part)
        keys.append(f"{key} #{keys.count(key) + 1}" if key in keys else key)
    restarts = _restarts(settings)
    if any(restarts) and len({key.partition(" #")[0] for key in keys}) < len(keys):
        raise SettingsError([
            "data.datasets lists datasets of equal content, one of them with restart=true, so it is not clear where "
            "their common samples begin. Give each content once."
        ])
    unit = math.lcm(*(part.share.denominator for part in parts))
    shares = [int(part.share * unit) for part in parts]  # because: exactly those by which a run's first mixture is read
    seed, is_blend = requirements.seed, isinstance(settings, BlendSettings)
    first_seeds = blend_seeds(seed, len(parts)) if is_blend else [seed]
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
    return replace(history, held_out=history.held_out.joined(HeldOut(held_out, tokens, frozenset(validated))))


def _restarts(settings: DataChoice) -> list[bool]:
    """Return, for each training dataset, True if its setting `restart` is true: then the stage reads it from its first
    sample again, instead of going on after the samples that earlier stages of the run have read.
    """
    if isinstance(settings, BlendSettings):
        return [part.restart for part in settings.datasets]
    return [isinstance(settings, DataSettings) and settings.restart]


def _trained_before_warning(builder: DatasetBuilder, opened: OpenDatasets) -> str | None:
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


def _stream_key(builder: DatasetBuilder, part: TrainingPart) -> str:
    """Return a string that identifies the samples of a training dataset, to recognize them in a later stage of the run:
    a digest of the dataset's content, seq_len, packing or masking, and the ranges of documents and tokens.
    """
    settings, documents = builder.settings, part.documents
    kind = settings.packing if not isinstance(settings, MaskedSettings) else hashlib.sha256(
        json.dumps(settings.sample_identity, sort_keys=True).encode()
    ).hexdigest()[:KEY_DIGITS]
    words = [part.indexed.content_digest[:KEY_DIGITS], str(builder.requirements.seq_len), kind]
    words += [f"documents {documents.start}-{documents.stop}"]
    words += [] if part.tokens is None else [f"tokens {part.tokens.start}-{part.tokens.stop}"]
    return " ".join(words)


@dataclass(frozen=True)
class _HeldOutTail:
    """Cut between the tokens to train on and the last tokens, held out, of a dataset with too few documents to split.
    """

    train_tokens: range
    tokens: range  # tokens held out for validation

    def describe(self, documents: range, indexed: IndexedDataset) -> str:
        """Return a clause for the user that says how many tokens at the end of a dataset are held out for validation.
        `documents` are the training documents, from whose end these tokens are taken.
        """
        few = "its only document" if len(documents) == 1 else f"its {len(documents)} documents"
        held_out, total = len(self.tokens), len(self.train_tokens) + len(self.tokens)
        return (
            f"the last {held_out:,} of {total:,} tokens of {indexed.prefix} ({held_out / total:.1%}), "
            f"from the end of {few}, which are not trained on"
        )


def _hold_out_tail(builder: DatasetBuilder, opened: OpenDatasets) -> _HeldOutTail | None:
    """Return the cut that holds out the last tokens of the only training dataset for validation, if it has too few
    documents to hold out whole ones. Return None if data.split gives validation a document or no share, if validation
    has datasets of its own, or if samples are not cut from concatenated text.

    Validation gets that share of the tokens, at least one sample. Raise DataError if there are not two samples.
    """
    [indexed] = opened.train
    documents, held_out = builder.split_ranges(indexed)[:2]
    if opened.valid or held_out or not documents or not builder.share or not builder.is_concatenated:
        return None
    map_ = builder.document_map(indexed)
    first, last, min_tokens = map_.start(documents.start), map_.start(documents.stop), builder.requirements.seq_len + 1
    cut_token = last - max(round((last - first) * builder.share), min_tokens)
    if cut_token - first < min_tokens:
        num_tokens = last - first
        longest = num_tokens // 2 - 1
        ways = [f"model.seq_len={longest}"] * (longest > 0)
        ways += ["train.valid_interval_steps=0"] * (num_tokens >= min_tokens)
        raise DataError(
            f"{indexed.prefix} has {num_tokens} tokens, too few for two samples of "
            f"{builder.requirements.seq_len}, one to train on and one to validate on. "
            f"Give {', or '.join(['more text or data.valid_path=PREFIX', *map(way, ways)])}."
        )
    return _HeldOutTail(range(first, cut_token), range(cut_token, last))


def _describe_held_out(builder: DatasetBuilder, opened: Sequence[IndexedDataset]) -> tuple[str | None, str | None]:
    """Return (note, warning) for the user: how many tokens of the training datasets validation takes, and a warning if
    it takes far more of a dataset than data.split requests. Both are None if it takes none; without excess the warning
    is None.
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


def _excess_warning(builder: DatasetBuilder, indexed: IndexedDataset, held_out: int) -> str | None:
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


def _build_valid_dataset(builder: DatasetBuilder, opened: OpenDatasets) -> Dataset:
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
    settings: BlendSettings, builder: DatasetBuilder, opened: OpenDatasets
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
    sizes = [dataset.num_samples for dataset in sets]
    num_samples = min(size * sum(shares) // share for size, share in zip(sizes, shares, strict=True))
    order = BlendOrder(shares, sizes, list(map(FileOrder, sizes)))
    sources = map(ValidationSource, names, map(Fraction, shares))
    return OrderedDataset(BlendedDataset(sets), order, max(num_samples, 1)), tuple(sources)


def _has_sample(builder: DatasetBuilder, indexed: IndexedDataset, documents: range) -> bool:
    """Return True if the documents with these numbers have enough tokens for at least one sample."""
    if len(documents) == 0:
        return False
    tokens = builder.count_tokens(indexed, documents)
    is_cut = builder.megatron or builder.settings.packing == "concatenate"
    return tokens > (builder.requirements.seq_len if is_cut else len(documents))


def _no_validation_error(builder: DatasetBuilder, opened: OpenDatasets, alternative: str) -> SettingsError:
    """Return the error for training data that has no document left to validate on. `alternative` is a setting that its
    message suggests, such as data.valid_path=PREFIX.
    """
    without = way("train.valid_interval_steps=0")
    if all(indexed.num_documents == 1 for indexed in opened.train):
        name = str(opened.train[0].prefix) if len(opened.train) == 1 else "Each dataset"
        way_out = "Preprocess text with a document in each line (.jsonl) or file, or set"
        if isinstance(builder.settings, DataSettings) and builder.settings.text is not None:
            finer = finer_split(builder.settings.texts, builder.settings.text_split)
            cut = f"Cut plain text into documents with {way(f'data.text_split={finer[0]}')}" if finer else ""
            way_out = f"{cut or 'Give a text of several documents'}, or set"
        return SettingsError([
            f"{name} has only one document, so none is left to validate on. {way_out} {alternative} or "
            f"{without}."
        ])
    return SettingsError([
        f"data.split={list(builder.settings.split)} leaves no document to validate on. Give the second part a larger "
        f"share, {alternative}, or {without}."
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
    """Raise this process's soft limit on open files if `num_files` open data files would exceed it, as those of a blend
    of many datasets often do. Do nothing if the limit is high enough.

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
