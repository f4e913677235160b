"""Settings of training data: paths, splits, packing, order, masking. Torch-free; used by the configs in conf/data/."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import PurePath
from typing import Any, ClassVar, Literal

from lmtrain.config.build_typed_settings import quantity, required
from lmtrain.config.settings_base import Check, Choice, Facts, Problem, Settings, problem_if, setting, show
from lmtrain.errors import example, fill_in, leave_out, own, way
from lmtrain.runfolder.tensorboard_metric_names import RESERVED_DOMAINS

_NAME = re.compile(r"[A-Za-z0-9_-]+")
REST = "rest"  # the name of all sources together that are not shown by themselves
_RESERVED_SOURCES = (*RESERVED_DOMAINS, REST)
_UNUSED = "is never read with train.valid_interval_steps=0, which means no validation"
_PREFIX_HINT = "Give a .bin's path without the suffix."
_VALIDATION_HINT = f"Add {way('train.valid_interval_steps=200')}, or {leave_out(shown='leave it out')}."
_PATH_OR_TEXT = (
    f"Give {fill_in('data.path=PREFIX')} of a dataset, or {fill_in('data.text=FILE')} to make a dataset of a text."
)
_OWN_ORDER = way(".order=own", instead_of=".megatron_samples")  # because: only Megatron-LM's order has that number


@dataclass(frozen=True, kw_only=True)
class DataChoice(Choice):
    """Settings that every kind of data has."""

    package = "lmtrain.data"
    field_facts: ClassVar[Facts] = Facts(per_stage=True)

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the loss terms that the samples have labels for, as in a model's `terms`: ("lm",) by default."""
        return ("lm",)

    def scored_share(self, seq_len: int) -> float:
        """Return the mean share (0 to 1) of a sample's tokens that are scored; 1 if every token has a label."""
        return 1.0

    @property
    def valid_sources(self) -> Sequence[str]:
        """Names of the datasets of the blend that validation reads; empty if it reads no blend."""
        return ()

    tokenizer: str | None = setting(default=None, path="tokenizer", per_stage=False)
    valid_paths: dict[str, str] = setting(default_factory=dict, path="dataset", affects="held_out")
    split: tuple[float, ...] = (0.98, 0.02, 0.0)
    train_on_held_out: bool = False
    document_mask: bool = False
    packing: Literal["concatenate", "document", "best_fit"] = "concatenate"
    order: Literal["own", "megatron"] = "own"
    megatron_samples: int | None = quantity("count", default=None, per_stage=False)
    first_sample: int = quantity("count", default=0, per_stage=False)
    index_dir: str | None = setting(default=None, path="folder", affects="nothing")
    verify: Literal["read", "full", "none"] = setting(default="read", affects="nothing")
    max_epochs: float | None = setting(default=None, affects="nothing")
    prefetch_steps: int = setting(default=2, affects="nothing")

    def problems_without_validation(self) -> Iterator[Problem]:
        """Yield a problem for each setting of validation data that is set. Only for a run that does not validate, which
        never reads these settings.
        """
        yield from problem_if(
            len(self.valid_paths) > 0, "data.valid_paths", self.valid_paths, _UNUSED, _VALIDATION_HINT
        )

    def problems(self) -> Iterator[Problem]:
        shares = "[" + ",".join(show(share) for share in self.split) + "]"
        all_finite = 1 <= len(self.split) <= 3 and all(0 <= share < float("inf") for share in self.split)
        yield from problem_if(
            not (all_finite and self.split[0] > 0), "split", shares,
            "must be one to three shares (training, validation, test), none negative and the first above 0",
            f"Give shares such as {example('[0.98,0.02,0]')}.",
        )  # fmt: skip
        yield from self.checked(
            self.at_least(0, "prefetch_steps", f"Use {own(2)}, or {own(0)} to read each step only when it is needed."),
            (self.packing == "best_fit" and not self.document_mask and self.order == "own", "packing",
             "puts unrelated documents into one sample",
             f"Add {way('.document_mask=true')}."),
            (self.order == "megatron" and self.packing != "concatenate", "packing",
             "is not supported by Megatron-LM, whose order data.order=megatron reproduces",
             f"Use {own('concatenate')} or {_OWN_ORDER}."),
            (self.order == "own" and self.megatron_samples is not None, "megatron_samples",
             "has no meaning with data.order=own",
             f"Add {way('.order=megatron')}, or {leave_out(shown='leave it out')}."),
            self.at_least(1, "megatron_samples", "Give the number of samples of Megatron-LM's whole run."),
            self.at_least(0, "first_sample", f"Use {own(0)} to begin with the first sample."),
            self.above_0("max_epochs", f"Use {own(4)}, or null for no limit."),
        )  # fmt: skip
        for name, path in self.valid_paths.items():
            yield from self.checked(
                (not _NAME.fullmatch(name) or name in RESERVED_DOMAINS, "valid_paths",
                 f"names a domain {name!r}; a name is letters, digits, - and _, but "
                 f"not {', '.join(RESERVED_DOMAINS)}",
                 "Choose another name, as in data.valid_paths={NAME: PREFIX}."),
                (not path.strip(), "valid_paths", f"names no dataset for {name}", _PREFIX_HINT),
            )  # fmt: skip

    def one_validation_key(self, kind_key: str) -> Check:
        """Return a rule, to pass to `checked`, that is broken if both `valid_paths` and the setting `kind_key` are set,
        as both name validation data. `kind_key` is "valid_path" if data.kind is dataset, "valid_datasets" if it is
        blend.
        """
        return (
            bool(self.valid_paths) and bool(getattr(self, kind_key)), "valid_paths",
            f"and data.{kind_key} are both set and both name validation data", "Give only one of them.",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataSettings(DataChoice):
    """Settings of a single dataset, split into training, validation and test parts: a dataset that exists, or one that
    the run makes of `text` before it begins.
    """

    kind = "dataset"

    # the prefix of the dataset, which is the path of its .bin without the suffix
    path: str = required(_PATH_OR_TEXT, path="dataset")
    valid_path: str | None = setting(default=None, path="dataset", affects="held_out")
    restart: bool = False
    text: str | tuple[str, ...] | None = setting(default=None, path="text", per_stage=False)
    text_suffixes: tuple[str, ...] = setting(default=(), per_stage=False)
    text_key: str = setting(default="text", per_stage=False)
    text_split: Literal["file", "blank-line", "line"] = setting(default="file", per_stage=False)
    text_limit: int = quantity("bytes", default=1 << 30, per_stage=False)
    text_dir: str | None = setting(default=None, path="folder", per_stage=False, affects="nothing")

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that `text` names: files, folders and globs."""
        return (self.text,) if isinstance(self.text, str) else self.text or ()

    @property
    def cuts_sentences(self) -> bool:
        """True if a dataset made of `text` must have a sequence for each sentence."""
        return False

    @classmethod
    def text_fields(cls) -> dict[str, dataclasses.Field[Any]]:
        """Return the fields that say of which text a dataset is made, and how, by name."""
        return {entry.name: entry for entry in dataclasses.fields(cls) if entry.name.startswith("text")}

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from self.checked(
            (not self.path, "path", "names no dataset", _PREFIX_HINT),
            self.one_validation_key("valid_path"),
            (self.text is not None and not (self.texts and all(map(str.strip, self.texts))), "text", "names no text",
             "Give a file or a folder, or several: data.text=[FILE,FOLDER]."),
            ("-" in self.texts, "text", "is a pipe, which cannot be read again on resume", "Write it to a file first."),
            self.at_least(1, "text_limit", f"Use {own('1GiB')}."),
        )
        for key, entry in self.text_fields().items():
            yield from self.problem_if(
                self.text is None and getattr(self, key) != entry.default, key,
                "has no effect without data.text, of which it says how a dataset is made",
                f"{leave_out()}, or add data.text=FILE.",
            )  # fmt: skip

    def problems_without_validation(self) -> Iterator[Problem]:
        yield from super().problems_without_validation()
        yield from problem_if(
            self.valid_path is not None, "data.valid_path", self.valid_path, _UNUSED, _VALIDATION_HINT
        )


@dataclass(frozen=True, kw_only=True)
class BlendPart(Settings):
    """Settings of one dataset in a blend: its path, exactly one of weight, tokens and epochs, and its name."""

    path: str = setting(path="dataset")  # the prefix of a dataset, which is the path of its .bin without the suffix
    # the name of its loss; null for the last part of the path
    name: str | None = setting(default=None, affects="measures")
    weight: float | None = None
    tokens: int | None = quantity("count", default=None)
    epochs: float | None = None
    restart: bool = False

    def problems(self) -> Iterator[Problem]:
        shares = {key: v for key in ("weight", "tokens", "epochs") if (v := getattr(self, key)) is not None}
        yield from self.checked(
            (not self.path, "path", "names no dataset", _PREFIX_HINT),
            (not shares, "path", "has none of weight, tokens and epochs", f"Use {way('.weight=1')}, tokens or epochs."),
            (len(shares) > 1, "path", f"has {len(shares)} of weight, tokens and epochs", "Give it exactly one."),
            (self.name is not None and (not _NAME.fullmatch(self.name) or self.name in _RESERVED_SOURCES), "name",
             f"is not a valid name for {self.path}; a name is letters, digits, - and _, but "
             f"not {', '.join(_RESERVED_SOURCES)}",
             f"Use {own(_valid_name(self.name or ''))}."),
            *(
                (not 0 < value < float("inf"), key, f"is not a valid share for {self.path}", "Give a number above 0.")
                for key, value in shares.items()
            ),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        # because: a run recorded before these keys existed must not look changed when it is resumed
        unset = {"name": None, "restart": False}
        return {key: value for key, value in super().to_dict().items() if key not in unset or value != unset[key]}


def _valid_name(text: str) -> str:
    """Return `text` as the name of a dataset: other characters than letters, digits, - and _ become _, and a reserved
    name gets a suffix.
    """
    name = re.sub(r"[^A-Za-z0-9_-]", "_", text) or "_"
    return f"{name}-2" if name in _RESERVED_SOURCES else name


def source_names(parts: Sequence[BlendPart]) -> list[str]:
    """Return a unique name for each dataset of a blend: the name of its settings, or else the last part of its path, in
    which other characters than letters, digits, - and _ become _, with a suffix such as -2 if the name is taken.
    """
    taken = {*_RESERVED_SOURCES, *(part.name for part in parts if part.name is not None)}
    names = []
    for part in parts:
        name = part.name
        if name is None:
            base = _valid_name(PurePath(part.path).name)
            candidates = chain([base], (f"{base}-{number}" for number in count(2)))
            name = next(candidate for candidate in candidates if candidate not in taken)
            taken.add(name)
        names.append(name)
    return names


@dataclass(frozen=True, kw_only=True)
class BlendSettings(DataChoice):
    """Settings of several datasets mixed by their shares; each dataset is split like a single dataset."""

    kind = "blend"

    datasets: tuple[BlendPart, ...] = ()
    valid_datasets: tuple[BlendPart, ...] = setting(default=(), affects="held_out")

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from problem_if(
            len(self.datasets) == 0, "datasets", "[]", "names no dataset to blend",
            "Give a list such as data.datasets=[{path: PREFIX, weight: 2}, {path: PREFIX, weight: 1}].",
        )  # fmt: skip
        for key in ("datasets", "valid_datasets"):
            parts: tuple[BlendPart, ...] = getattr(self, key)
            weighted = sum(part.weight is not None for part in parts)
            yield from problem_if(
                weighted not in (0, len(parts)), key, f"{weighted} weights for {len(parts)} datasets",
                "mixes weights with tokens or epochs, which cannot be compared", "Give weights to all, or to none.",
            )  # fmt: skip
            for values, rule, way_out in (
                ([part.path for part in parts], "is listed twice", "Give the sum of its shares in one entry."),
                ([part.name for part in parts if part.name], "is the name of several datasets",
                 "Give each dataset a name of its own."),
            ):  # fmt: skip
                repeated = [value for value, times in Counter(values).items() if times > 1]
                yield from problem_if(len(repeated) > 0, key, ", ".join(repeated), rule, way_out)
        for number, part in enumerate(self.valid_datasets):
            yield from problem_if(
                part.restart, f"valid_datasets[{number}].restart", True,
                "has no effect, since each validation begins at the first sample", f"Use {own('false')}.",
            )  # fmt: skip
        yield from self.checked(
            self.one_validation_key("valid_datasets"),
            (self.order == "megatron" and any(part.weight is None for part in self.datasets), "order",
             "blends by weights only", f"Give every dataset a weight, or use {_OWN_ORDER}."),
        )  # fmt: skip

    @property
    def valid_sources(self) -> Sequence[str]:
        return () if self.valid_paths else source_names(self.valid_datasets or self.datasets)

    def problems_without_validation(self) -> Iterator[Problem]:
        yield from super().problems_without_validation()
        paths = "[" + ",".join(part.path for part in self.valid_datasets) + "]"
        yield from problem_if(len(self.valid_datasets) > 0, "data.valid_datasets", paths, _UNUSED, _VALIDATION_HINT)


@dataclass(frozen=True, kw_only=True)
class MaskedSettings(DataSettings):
    """Settings of BERT samples: pairs of sentence runs with masked words, from data made with --split-sentences."""

    kind = "masked"

    pairs: Literal["sentence_order", "next_sentence", "none"] = "sentence_order"
    min_sentences: int = 2
    short_share: float = 0.1
    mask_share: float = 0.15
    max_predictions: int | None = None
    whole_word: bool = True
    max_ngram: int = 1

    @property
    def cuts_sentences(self) -> bool:
        return True

    @property
    def terms(self) -> tuple[str, ...]:
        return ("mlm",) if self.pairs == "none" else ("mlm", "pair")

    def scored_share(self, seq_len: int) -> float:
        return min(self.mask_share, (self.max_predictions or seq_len) / seq_len)

    @property
    def sample_identity(self) -> dict[str, Any]:
        """The settings that decide, together with the dataset and the seed, how samples are cut and masked."""
        keys = ("pairs", "min_sentences", "short_share", "mask_share", "max_predictions", "whole_word", "max_ngram")
        return {key: getattr(self, key) for key in keys}

    def problems(self) -> Iterator[Problem]:
        # because: any packing is refused below, so it must not get the advice to add a mask
        yield from (problem for problem in super().problems() if problem.key != "packing")
        minimum = 1 if self.pairs == "none" else 2
        no_meaning = "has no meaning with masked samples"
        yield from self.checked(
            (self.document_mask, "document_mask", no_meaning, f"{leave_out()}."),
            (self.packing != "concatenate", "packing", no_meaning, f"{leave_out()}."),
            (self.min_sentences < minimum, "min_sentences",
             f"must be at least {minimum} with pairs={self.pairs}", f"Use {own(minimum)}."),
            (not 0 <= self.short_share <= 1, "short_share", "must lie in 0..1",
             f"Give a share, such as {example(0.1)}."),
            (not 0 < self.mask_share < 1, "mask_share", "must lie between 0 and 1",
             f"Give a share, such as {example(0.15)}."),
            self.at_least(1, "max_predictions", f"Use {own('null')} for no limit."),
            (not 1 <= self.max_ngram <= 16, "max_ngram", "must lie in 1..16", f"Use {own(1)} to {own(16)}."),
            (self.order == "megatron" and self.pairs == "next_sentence", "order",
             "supports pairs=sentence_order and pairs=none only, as Megatron-LM does", f"Use {_OWN_ORDER}."),
        )  # fmt: skip
