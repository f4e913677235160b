"""Builds from the data settings what a run reads: training samples, their order, and validation samples.

Called by preflight and by `lmtrain data`. Datasets are opened first, because the vocabulary size follows from them, and
cut into samples once it is known. Torch-free; must not know what the samples are used for.
"""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from lmtrain.data.data_settings import BlendPart, BlendSettings, DataChoice, DataSettings, MaskedSettings
from lmtrain.data.dataset import Dataset, InOrder, Later, Order, SampleOrder
from lmtrain.data.samples.blend import BlendedDataset, BlendOrder, MegatronBlendOrder, whole_shares
from lmtrain.data.samples.causal import CausalDataset
from lmtrain.data.samples.masked import MaskedDataset, MaskVocabulary, WordPieces
from lmtrain.data.samples.megatron import AsNumbered, MegatronDataset, blend_sizes, split_sequences
from lmtrain.data.samples.packing import PackedDataset
from lmtrain.data.store.documents import DocumentMap, index_folder, record_path, split_documents, split_tokens
from lmtrain.data.store.index_cache import IndexCache
from lmtrain.data.store.indexed import IndexedDataset
from lmtrain.errors import DataError, SettingsError, StorageError, join_few
from lmtrain.observe.safe_text import warn

_COUNTED = 1 << 18  # samples counted exactly (a second's work); the count of a longer run is extrapolated
_FILES_EACH = 3  # because: .bin and .idx stay open under their memory maps, and a record of checksums may be a third
_OTHER_FILES = 48  # files that Python, torch and the run's own records hold open

# Rules for applying data.split. "tokens": the validation share is held out, counted in tokens. "read" (older): the
# same, counted in documents. "all" (oldest): every share but the first is held out, whether anything reads it or not.
# A resumed run keeps the rule it began with.
TOKEN_SHARES, READ_SHARES, ALL_SHARES = SHARES = "tokens", "read", "all"
_FAR = 2  # times the requested share of validation, above which a warning is given


@dataclass(frozen=True)
class Opened:
    """The datasets that the settings name, before they are cut into samples."""

    train: list[IndexedDataset]
    valid: list[IndexedDataset]  # empty: validation reads a part of each dataset in `train`

    @property
    def all(self) -> list[IndexedDataset]:
        return self.train + self.valid


@dataclass(frozen=True)
class Asked:
    """The run's requirements on the data beyond the data settings."""

    seq_len: int
    vocab_size: int
    seed: int
    num_samples: int  # samples of the whole run
    validate: bool
    tokenizer: WordPieces | None = None  # for masked samples only
    shares: str = TOKEN_SHARES  # an entry of SHARES


@dataclass(frozen=True)
class Part:
    """A dataset's contribution to the training samples."""

    indexed: IndexedDataset
    documents: range
    dataset: Dataset
    share: Fraction


@dataclass(frozen=True)
class TrainingData:
    """The training samples with their order, the validation samples by domain, and facts about both."""

    train: Dataset
    order: SampleOrder
    valid: Mapping[str, Dataset]  # by domain; "" is a single unnamed domain, empty: no validation
    parts: list[Part]
    sample_identity: dict[str, Any]  # facts that decide which tokens the sample at each position has
    first_sample: int
    num_samples: int  # number of samples that the run reads
    pads: bool = False  # True if samples can be shorter than seq_len
    said: str | None = None  # sentence: which part of the training datasets validation takes
    warning: str | None = None  # warning if validation takes far more than the requested share
    datasets: tuple[IndexedDataset, ...] = ()  # every dataset that training and validation read

    @property
    def content_sha256(self) -> str | None:
        """Hash of the only dataset, or the hash over all datasets' hashes; None if any dataset has no sidecar."""
        hashes = [part.indexed.info.content_sha256 for part in self.parts if part.indexed.info]
        if len(hashes) < len(self.parts):
            return None
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()

    def contributions(self, seq_len: int) -> list[dict[str, Any]]:
        """Return one row per dataset: its size and how much of it the run reads."""
        counts = [self.num_samples] if len(self.parts) == 1 else self._counts()
        tokens = self._tokens(counts) if self.pads else [count * seq_len for count in counts]
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

    def _tokens(self, counts: Sequence[int]) -> list[int]:
        """Return the tokens without padding that the run reads per dataset, as metrics count them.

        The first samples of the run are counted exactly; the rest is extrapolated in proportion.
        """
        ids = self.order.ids(0, min(self.num_samples, _COUNTED))
        train = self.train
        found = train.tokens_each(ids) if isinstance(train, BlendedDataset) else [(len(ids), train.counts(ids).tokens)]
        mean = sum(tokens for _, tokens in found) / len(ids)
        return [
            tokens + round((count - samples) * (tokens / samples if samples else mean))
            for count, (samples, tokens) in zip(counts, found, strict=True)
        ]

    def _counts(self) -> list[int]:
        order = self.order.order if isinstance(self.order, Later) else self.order
        assert isinstance(order, (BlendOrder, MegatronBlendOrder))
        before, after = (order.counts_at(self.first_sample + taken) for taken in (0, self.num_samples))
        return [late - early for early, late in zip(before, after, strict=True)]


def open_datasets(settings: DataChoice) -> Opened:
    """Open the datasets that the settings name. Raise SettingsError for settings of another kind of data."""
    if isinstance(settings, DataSettings):
        paths, valid_paths = [settings.path], [settings.valid_path] if settings.valid_path else []
    elif isinstance(settings, BlendSettings):
        paths, valid_paths = ([part.path for part in parts] for parts in (settings.datasets, settings.valid_datasets))
    else:
        raise SettingsError([f"data.kind={settings.kind} makes no samples of text. Use dataset, blend or masked."])
    valid_paths += settings.valid_paths.values()
    _allow_files(_FILES_EACH * (len(paths) + len(valid_paths)))
    return Opened(*([IndexedDataset.open(path) for path in some] for some in (paths, valid_paths)))


def build_training_data(settings: DataChoice, opened: Opened, asked: Asked) -> TrainingData:
    """Cut the opened datasets into training and validation samples, as the settings and the run require.

    Raise SettingsError or DataError if the data is too small or the settings do not fit it.
    """
    make = _Maker(settings, asked, reads_valid=len(opened.valid) == 0)
    for indexed in opened.all:
        indexed.watch(settings.verify, record_path(indexed, make.index_folder(indexed)), warn)
    needed = settings.first_sample + asked.num_samples
    wanted = settings.megatron_samples or needed
    if wanted < needed:
        raise SettingsError([
            f"data.megatron_samples={wanted} is less than data.first_sample={settings.first_sample} and the "
            f"{asked.num_samples} samples of this run. Give what the whole of Megatron-LM's run was to take."
        ])
    valid = make.domains(opened.valid) if asked.validate else {}
    held_out, said, warning = 0, None, None
    if asked.validate and not opened.valid:
        said, warning = _taken(make, opened.train)
    if isinstance(settings, BlendSettings):
        train, order, parts = _blend(settings, make, opened.train, wanted)
        if asked.validate and not valid:
            valid = {"": _valid_blend(settings, make, opened)}
    else:
        [indexed] = opened.train
        documents = make.ranges(indexed)[0]
        tail = _tail(make, opened) if asked.validate else None
        train = make.dataset(indexed, documents, wanted, None if tail is None else tail.before)
        order = make.order(train)
        parts = [Part(indexed, documents, train, Fraction(1))]
        if tail is not None:
            valid, held_out = {"": make.dataset(indexed, documents, None, tail.tokens)}, len(tail.tokens)
            said, warning = tail.words(documents, indexed), _far(make, indexed, held_out)
        elif asked.validate and not valid:
            valid = {"": _valid_part(make, opened)}
    if settings.first_sample:
        order = Later(order, settings.first_sample)
    sample_identity = _sample_identity(settings, parts, wanted) | {"held_out_tokens": held_out}
    sample_identity |= {"shares": make.shares} if make.shares != ALL_SHARES else {}
    return TrainingData(
        train, order, valid, parts, sample_identity, settings.first_sample, asked.num_samples,
        pads=settings.packing != "concatenate" or isinstance(settings, MaskedSettings), said=said, warning=warning,
        datasets=tuple(opened.all),
    )  # fmt: skip


class _Maker:
    """Builder of sample datasets from document ranges, according to the settings."""

    def __init__(self, settings: DataChoice, asked: Asked, *, reads_valid: bool) -> None:
        """Set up the builder. `reads_valid`: whether validation would read a share of the training datasets."""
        self.settings, self.asked = settings, asked
        self.megatron = settings.order == "megatron"
        # because: with Megatron-LM's order every share must be cut where Megatron-LM cuts it, even if nothing reads it
        self.shares = ALL_SHARES if self.megatron else asked.shares
        self.split = settings.split[: 3 if self.shares == ALL_SHARES else 2 if reads_valid else 1]
        self.share = self.split[1] / sum(self.split) if len(self.split) > 1 else 0.0
        masked = isinstance(settings, MaskedSettings)
        self.by_sequence = self.megatron and not masked
        self.plain = not self.megatron and not masked and settings.packing == "concatenate"
        # because: concatenated text can be cut within a document, and a blend has other datasets to validate on
        self.least = 0 if self.plain or isinstance(settings, BlendSettings) else 1

    @cached_property
    def vocabulary(self) -> MaskVocabulary:
        assert self.asked.tokenizer is not None, "masked samples are made of words, which a tokenizer must spell"
        return MaskVocabulary.of(self.asked.tokenizer)

    def index_folder(self, indexed: IndexedDataset) -> Path:
        return index_folder(indexed, self.settings.index_dir)

    def cache(self, indexed: IndexedDataset) -> IndexCache:
        return IndexCache(self.index_folder(indexed))

    def ranges(self, indexed: IndexedDataset) -> Sequence[range]:
        """Return the document ranges to train on, to validate on, and that nothing reads, in this order."""
        if self.megatron:
            return split_sequences(len(self.everything(indexed)), self.split)
        if self.shares != TOKEN_SHARES or not self.share:
            return split_documents(indexed.num_documents, self.split)
        return split_tokens(DocumentMap.of(indexed, self.cache(indexed)), self.share, self.least)

    def everything(self, indexed: IndexedDataset) -> range:
        """Return the whole range to split: sequences for Megatron-LM's concatenated text, documents otherwise."""
        return range(indexed.num_sequences if self.by_sequence else indexed.num_documents)

    def num_tokens(self, indexed: IndexedDataset, documents: range) -> int:
        if self.by_sequence:
            return int(indexed.lengths[documents.start : documents.stop].sum())
        map_ = DocumentMap.of(indexed, self.cache(indexed))
        return map_.start(documents.stop) - map_.start(documents.start)

    def domains(self, opened: Sequence[IndexedDataset]) -> dict[str, Dataset]:
        """Return validation domain -> dataset of all its documents; empty if `valid_paths` is not set."""
        paths = self.settings.valid_paths
        found = zip(paths, opened if paths else (), strict=True)
        return {name: self.dataset(one, self.everything(one), None) for name, one in found}

    def order(self, dataset: Dataset) -> SampleOrder:
        if isinstance(dataset, MaskedDataset):
            return dataset.order(self.asked.seed)
        return AsNumbered(dataset.num_samples) if self.megatron else Order(dataset.num_samples, self.asked.seed)

    def dataset(
        self, indexed: IndexedDataset, documents: range, num_samples: int | None, tokens: range | None = None
    ) -> Dataset:
        """Build the samples of these documents.

        `num_samples` is used with Megatron-LM's order only; None means one epoch. `tokens` restricts concatenated
        samples to this token range, for documents that are split between training and validation.
        """
        settings, seq_len, vocab_size = self.settings, self.asked.seq_len, self.asked.vocab_size
        mask, cache = settings.document_mask, self.cache(indexed)
        if isinstance(settings, MaskedSettings):
            return MaskedDataset(
                indexed, documents, seq_len, self.vocabulary, settings, self.asked.seed, num_samples, cache
            )  # fmt: skip
        if self.megatron:
            return MegatronDataset(
                indexed, documents, seq_len, num_samples, self.asked.seed, mask, vocab_size, cache
            )  # fmt: skip
        if settings.packing == "concatenate":
            return CausalDataset(indexed, documents, seq_len, mask, vocab_size, cache, tokens)
        return PackedDataset(indexed, documents, seq_len, settings.packing, mask, vocab_size, cache)


def _blend(
    settings: BlendSettings, make: _Maker, opened: Sequence[IndexedDataset], wanted: int
) -> tuple[Dataset, SampleOrder, list[Part]]:
    """Return a blend's training samples, their order, and each dataset's part."""
    ranges = [make.ranges(indexed)[0] for indexed in opened]
    if make.megatron:
        weights = [part.weight or 0.0 for part in settings.datasets]
        given, asked_for = blend_sizes(weights, wanted)
        sets = [make.dataset(*one) for one in zip(opened, ranges, asked_for, strict=True)]
        total = sum(map(Fraction, weights), Fraction())
        shares = [Fraction(weight) / total for weight in weights]
        order: SampleOrder = MegatronBlendOrder(weights, [one.num_samples for one in sets], sum(given))
    else:
        sets = [make.dataset(indexed, documents, None) for indexed, documents in zip(opened, ranges, strict=True)]
        whole = _shares(settings.datasets, sets, make.asked.seq_len)
        shares = [Fraction(share, sum(whole)) for share in whole]
        order = BlendOrder(whole, [one.num_samples for one in sets], make.asked.seed)
    return BlendedDataset(sets), order, [Part(*one) for one in zip(opened, ranges, sets, shares, strict=True)]


def _shares(parts: Sequence[BlendPart], sets: Sequence[Dataset], seq_len: int) -> list[int]:
    """Return each dataset's integer share: weights are used directly, tokens and epochs are converted to samples."""
    return whole_shares([
        part.weight if part.weight is not None
        else Fraction(part.tokens, seq_len) if part.tokens is not None
        else Fraction(repr(part.epochs)) * one.num_samples
        for part, one in zip(parts, sets, strict=True)
    ])  # fmt: skip


@dataclass(frozen=True)
class _Tail:
    """The last tokens of a dataset with too few documents to hold a whole document out for validation."""

    before: range  # tokens to train on
    tokens: range

    def words(self, documents: range, indexed: IndexedDataset) -> str:
        few = "its only document" if len(documents) == 1 else f"its {len(documents)} documents"
        taken, tokens = len(self.tokens), len(self.before) + len(self.tokens)
        return (
            f"the last {taken:,} of {tokens:,} tokens of {indexed.prefix} ({taken / tokens:.1%}), "
            f"cut off {few} and not trained on"
        )


def _tail(make: _Maker, opened: Opened) -> _Tail | None:
    """Return the token cut if data.split's validation share rounds to no document, else None.

    Validation gets that share of the tokens, at least one sample. Raise DataError if there are not two samples.
    """
    [indexed] = opened.train
    documents, held_out = make.ranges(indexed)[:2]
    if opened.valid or held_out or not documents or not make.share or not make.plain:
        return None
    map_ = DocumentMap.of(indexed, make.cache(indexed))
    first, last, least = map_.start(documents.start), map_.start(documents.stop), make.asked.seq_len + 1
    cut = last - max(round((last - first) * make.share), least)
    if cut - first < least:
        raise DataError(
            f"{indexed.prefix} has {last - first} tokens, which are not two samples of {make.asked.seq_len}: one to "
            "train on and one to validate on. Use more text, a smaller model.seq_len, data.valid_path=PREFIX, or "
            "train.valid_interval_steps=0."
        )
    return _Tail(range(first, cut), range(cut, last))


def _taken(make: _Maker, opened: Sequence[IndexedDataset]) -> tuple[str | None, str | None]:
    """Return (a sentence about what validation takes of the training datasets, a warning if that is far too much).

    Each is None if there is nothing to report.
    """
    parts = [(one, make.ranges(one)[1]) for one in opened]
    each = {one: make.num_tokens(one, documents) for one, documents in parts if make.share}
    if not (taken := sum(each.values())):
        return None, None
    tokens = sum(make.num_tokens(one, make.everything(one)) for one in opened)
    name = str(opened[0].prefix) if len(opened) == 1 else f"{len(opened)} datasets"
    said = f"{taken:,} of {tokens:,} tokens of {name} ({taken / tokens:.1%}), which are not trained on"
    if without := [str(one.prefix) for one, documents in parts if not _has_sample(make, one, documents)]:
        said += f"; {join_few(without)} {'has' if len(without) == 1 else 'have'} nothing to spare for it"
    return said, next((far for one, number in each.items() if (far := _far(make, one, number))), None)


def _far(make: _Maker, indexed: IndexedDataset, taken: int) -> str | None:
    """Return a warning if `taken` tokens are more than _FAR times the requested validation share, else None."""
    share = taken / max(make.num_tokens(indexed, make.everything(indexed)), 1)
    if share <= _FAR * make.share:
        return None
    return (
        f"validation takes {share:.1%} of the tokens of {indexed.prefix}, and data.split asks for {make.share:.1%}. "
        "More text, shorter documents or data.valid_path=PREFIX leave more to train on."
    )


def _valid_part(make: _Maker, opened: Opened) -> Dataset:
    if opened.valid:
        return make.dataset(opened.valid[0], make.everything(opened.valid[0]), None)
    documents = make.ranges(opened.train[0])[1]
    if len(documents) == 0:
        raise _nothing_to_validate_on(make, opened, "data.valid_path=PREFIX")
    return make.dataset(opened.train[0], documents, None)


def _valid_blend(settings: BlendSettings, make: _Maker, opened: Opened) -> Dataset:
    """Return the blend's validation samples, in the blend's proportions until the first dataset runs out."""
    if opened.valid:
        parts = settings.valid_datasets
        chosen = [(one, make.everything(one)) for one in opened.valid]
    else:
        parts = settings.datasets
        chosen = [(one, make.ranges(one)[1]) for one in opened.train]
    sets, kept = [], []
    for part, (indexed, documents) in zip(parts, chosen, strict=True):
        if opened.valid or _has_sample(make, indexed, documents):  # a small dataset may give no sample
            sets.append(make.dataset(indexed, documents, None))
            kept.append(part)
    if not sets:
        raise _nothing_to_validate_on(make, opened, "data.valid_datasets=[...]")
    shares = _shares(kept, sets, make.asked.seq_len)
    num_samples = min(one.num_samples * sum(shares) // share for one, share in zip(sets, shares, strict=True))
    order = BlendOrder(shares, [one.num_samples for one in sets], make.asked.seed, shuffled=False)
    return InOrder(BlendedDataset(sets), order, max(num_samples, 1))


def _has_sample(make: _Maker, indexed: IndexedDataset, documents: range) -> bool:
    if len(documents) == 0:
        return False
    tokens, is_cut = make.num_tokens(indexed, documents), make.megatron or make.settings.packing == "concatenate"
    return tokens > (make.asked.seq_len if is_cut else len(documents))


def _nothing_to_validate_on(make: _Maker, opened: Opened, other: str) -> SettingsError:
    if all(one.num_documents == 1 for one in opened.train):
        name = str(opened.train[0].prefix) if len(opened.train) == 1 else "Each dataset"
        return SettingsError([
            f"{name} is one document, which leaves none to validate on. Preprocess text that has a document in each "
            f"line (.jsonl) or file, or set {other} or train.valid_interval_steps=0."
        ])
    return SettingsError([
        f"data.split={list(make.settings.split)} leaves no document to validate on. Give the second part a larger "
        f"share, set {other}, or train.valid_interval_steps=0."
    ])


def _sample_identity(settings: DataChoice, parts: Sequence[Part], wanted: int) -> dict[str, Any]:
    """Return the facts that decide which tokens the sample at each position has; a resumed run must have the same."""
    facts: dict[str, Any] = {
        "num_documents": sum(part.indexed.num_documents for part in parts),
        "num_tokens": sum(part.indexed.num_tokens for part in parts),
        "train_documents": [parts[0].documents.start, parts[-1].documents.stop],
        "document_mask": settings.document_mask,
        "packing": settings.packing,
        "order": settings.order if settings.order == "own" else f"megatron for {wanted} samples",
        "first_sample": settings.first_sample,
        "blend": None,
    }
    if isinstance(settings, MaskedSettings):
        facts |= settings.sample_identity
    if len(parts) > 1:
        each = [
            [part.documents.start, part.documents.stop, part.indexed.num_documents, part.indexed.num_tokens,
             str(part.share), part.indexed.info.content_sha256 if part.indexed.info else None]
            for part in parts
        ]  # fmt: skip
        facts["blend"] = f"{len(parts)} datasets, {hashlib.sha256(json.dumps(each).encode()).hexdigest()[:12]}"
    return facts


def _allow_files(num: int) -> None:
    """Raise the soft limit on open files if needed: a blend of many datasets exceeds the default of many systems.

    Raise StorageError if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num + 512 <= soft or soft == resource.RLIM_INFINITY:
        return
    limit = num + 512 if hard == resource.RLIM_INFINITY else min(num + 512, hard)
    if num + _OTHER_FILES > limit:
        fewer = " or merge some of the datasets" if num > 2 * _FILES_EACH else ""
        raise StorageError(
            f"The limit on open files is {hard} here, and this data needs {num} besides some {_OTHER_FILES} others. "
            f"Raise the limit (`ulimit -Hn`, or LimitNOFILE of a service){fewer}."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, soft), hard))
