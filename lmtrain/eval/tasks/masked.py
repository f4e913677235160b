"""Tasks for models that see both sides: prediction of masked tokens, and of whether one segment follows another.

A causal model has no such measures, and these measures are not a perplexity: their product is not the probability of a
text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import IGNORED
from lmtrain.data.data_settings import MaskedSettings
from lmtrain.data.samples.masked_language_samples import MaskedDataset, MaskVocabulary, build_sampler
from lmtrain.data.samples.masked_samples_python_fallback import Sentences
from lmtrain.errors import DataError, UsageError, way
from lmtrain.eval.read_texts import TextInput
from lmtrain.eval.task import Columns, Facts, Prepared, Sums, Task, TaskOptions, perplexity, ratio
from lmtrain.eval.task_recipes.hash_and_count_texts import (
    dataset_prefix,
    describe_dataset,
    describe_texts,
    group_by_file,
    open_dataset,
)
from lmtrain.eval.windows import MaskedRequest, Tokens, check_stride, windows

SEED = 1
NUM_MARKS = 2  # [CLS] and [SEP] around each window
MIN_SEQ_LEN = 8
_WINDOWS_AT_ONCE = 256  # windows masked together
_TEXT = "any text that `lmtrain preprocess` reads (.txt, .jsonl, .parquet, compressed, a folder), or a .bin/.idx prefix"
_MARKS = "[CLS] before each window and [SEP] behind it, which are never asked"


@dataclass(frozen=True)
class Documents:
    """Documents as slices of `tokens`."""

    tokens: Tokens
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]]) -> Documents:
        lengths = np.array([len(ids) for ids in documents], np.int64)
        tokens = np.concatenate([np.array(ids, np.int32) for ids in documents] or [np.zeros(0, np.int32)])
        return cls(tokens, np.cumsum(lengths) - lengths, lengths)

    def __iter__(self) -> Iterator[Tokens]:
        return (self.tokens[start : start + size] for start, size in zip(self.starts, self.lengths, strict=True))


@dataclass(frozen=True)
class SampledMasks:
    """Requests for disjoint windows, in each of which a fixed share of the tokens is masked at random."""

    documents: Documents
    vocabulary: MaskVocabulary
    seq_len: int
    settings: MaskedSettings

    @property
    def num_targets(self) -> int:
        if not len(self._items):
            return 0
        sizes, _ = self._sampler.counts(np.arange(len(self._items)))
        return int(sizes[:, 0].sum())

    def __iter__(self) -> Iterator[MaskedRequest]:
        for first in range(0, len(self._items), _WINDOWS_AT_ONCE):
            items = self._items[first : first + _WINDOWS_AT_ONCE]
            tokens_BT, labels_BT, _, not_padding_BT, *_ = self._sampler.batch(np.arange(first, first + len(items)))
            for row, item in enumerate(items.tolist()):
                places = np.flatnonzero(labels_BT[row] != IGNORED)
                if len(places):
                    tokens = np.concatenate([tokens_BT[row, not_padding_BT[row]], labels_BT[row, places]])
                    yield MaskedRequest(tokens, len(places), item, places=places)

    @cached_property
    def _items(self) -> NDArray[np.int64]:
        """The document of each window."""
        return np.repeat(np.arange(len(self.documents.lengths)), -(-self.documents.lengths // self._room))

    @property
    def _room(self) -> int:
        return self.seq_len - NUM_MARKS

    @cached_property
    def _sampler(self) -> Any:
        """The sampler that draws which tokens of each window are masked. It is built for sentences, and gets each
        window as a sentence that is a sample of its own.
        """
        items, count = self._items, len(self._items)
        number = np.arange(count) - np.searchsorted(items, items)
        starts = self.documents.starts[items] + number * self._room
        windows = Sentences(
            tokens=self.documents.tokens,
            lengths=np.minimum(self.documents.lengths[items] - number * self._room, self._room).astype(np.int32),
            pointers=(starts * self.documents.tokens.itemsize).astype(np.int64),
            bounds=np.array([0, count], np.int64),
            rows=np.stack([np.arange(count), np.arange(count) + 1, np.full(count, self._room)], 1).astype(np.int64),
        )
        return build_sampler(windows, self.vocabulary, self.settings, self.seq_len, SEED)


@dataclass(frozen=True)
class SingleMasks:
    """Requests that mask one token each: every token of every document once."""

    documents: Documents
    vocabulary: MaskVocabulary
    seq_len: int
    stride: int

    @property
    def num_targets(self) -> int:
        return int(self.documents.lengths.sum())

    def __iter__(self) -> Iterator[MaskedRequest]:
        special = self.vocabulary.special
        for item, tokens in enumerate(self.documents):
            # because: a token is masked in its own place, as if it were the target of the token before it
            for window in windows(len(tokens) + 1, self.seq_len - NUM_MARKS, self.stride, last_looks_back=True):
                fed = np.array([special["cls"], *tokens[window.start : window.stop], special["sep"]], np.int64)
                for place in range(window.first_scored - window.start, len(fed) - 1):
                    masked = np.append(fed, fed[place])
                    masked[place] = special["mask"]
                    yield MaskedRequest(masked, 1, item, places=np.array([place]))


@dataclass(frozen=True)
class PairRequests:
    """Requests for the label of each pair of segments of a dataset."""

    dataset: MaskedDataset

    @property
    def num_targets(self) -> int:
        return self.dataset.num_samples

    def __iter__(self) -> Iterator[MaskedRequest]:
        for first in range(0, self.num_targets, _WINDOWS_AT_ONCE):
            batch = self.dataset.batch(np.arange(first, min(first + _WINDOWS_AT_ONCE, self.num_targets)))
            for row, real_T in enumerate(batch.not_padding_BT):
                tokens = np.append(batch.tokens_BT[row, real_T], batch.pair_labels_B[row])
                yield MaskedRequest(tokens, 1, first + row, segments=batch.segments_BT[row, real_T])


class Masked(Task):
    data = _TEXT
    causal = False

    @abstractmethod
    def requests(
        self, documents: Documents, vocabulary: MaskVocabulary, options: TaskOptions
    ) -> SampledMasks | SingleMasks:
        """Return the requests for these documents, which may be iterated more than once."""

    def prepare_texts(self, texts: TextInput, options: TaskOptions) -> Prepared:
        documents = Documents.of(options.tokenizer.encode_batch(texts.documents))
        text_columns, facts = describe_texts(texts)
        return self._prepared(documents, options, text_columns, facts, groups=group_by_file(texts.files))

    def prepare(self, source: Path, options: TaskOptions) -> Prepared:
        prefix = dataset_prefix(source) or source
        indexed = open_dataset(prefix, options.tokenizer)
        ranges = np.array([indexed.document_range(document) for document in range(indexed.num_documents)], np.int64)
        starts, stops = ranges.reshape(-1, 2).T
        documents = Documents(indexed.tokens, starts, stops - starts)
        text_columns, facts = describe_dataset(indexed, documents, options.tokenizer)
        return self._prepared(documents, options, text_columns, facts)

    def _prepared(
        self, documents: Documents, options: TaskOptions, text_columns: Columns, facts: dict[str, Any], **more: Any
    ) -> Prepared:
        requests = self.requests(documents, mask_vocabulary(self, options), options)
        num_targets = requests.num_targets
        return Prepared(
            requests=requests,
            num_targets=num_targets,
            text_columns=text_columns,
            facts=Facts(
                protocol=options.protocol_id(self.id),
                num_tokens=int(documents.lengths.sum()),
                prefix=_MARKS,
                stride=requests.stride if isinstance(requests, SingleMasks) else options.seq_len - NUM_MARKS,
                denominator=f"masked tokens = {num_targets}",
                **facts | {"notes": facts["notes"] | {"masks": self.recipe["masks"]}},
            ),
            **more,
        )


class MaskedTokens(Masked):
    id = "masked/tokens"
    headline = "masked_token_perplexity"
    settings = MaskedSettings(path="text", pairs="none", min_sentences=1)
    recipe: ClassVar = {
        "text": "as it is, document by document",
        "windows": f"seq_len - {NUM_MARKS} tokens, disjoint",
        "masks": f"15 % of a window's tokens, in whole words; 80 % of them [MASK], 10 % any token, 10 % as they are; "
        f"seed {SEED}, the same whatever the batch size and the layout",
        "prefix": _MARKS,
        "denominator": "masked tokens, every piece of a masked word",
    }

    def requests(self, documents: Documents, vocabulary: MaskVocabulary, options: TaskOptions) -> SampledMasks:
        options.refuse_any_stride(self.id)
        return SampledMasks(documents, vocabulary, options.seq_len, self.settings)

    def measures(self, sums: Sums) -> dict[str, float]:
        return {
            "masked_token_perplexity": perplexity(sums["nll"], sums["targets"]),
            "masked_token_accuracy": ratio(sums["greedy"], sums["targets"]),
            "nll_per_masked_token_nats": ratio(sums["nll"], sums["targets"]),
        }


class PseudoPerplexity(Masked):
    id = "masked/pseudo-perplexity"
    headline = "pseudo_perplexity"
    recipe: ClassVar = {
        "text": "as it is, document by document",
        "windows": f"seq_len - {NUM_MARKS} tokens, moved by --stride (default: as many); the last one of a document is "
        "as long as the others; each token once",
        "masks": "one token at a time, by [MASK]; the other pieces of its word stay",
        "prefix": _MARKS,
        "denominator": "tokens, or words as the measure's name says; as many passes as tokens",
    }

    def requests(self, documents: Documents, vocabulary: MaskVocabulary, options: TaskOptions) -> SingleMasks:
        room = options.seq_len - NUM_MARKS
        stride = room if options.stride is None else options.stride
        check_stride(room, stride)
        return SingleMasks(documents, vocabulary, options.seq_len, stride)

    def measures(self, sums: Sums) -> dict[str, float]:
        measures = {
            "pseudo_perplexity": perplexity(sums["nll"], sums["targets"]),
            "masked_token_accuracy": ratio(sums["greedy"], sums["targets"]),
            "nll_per_token_nats": ratio(sums["nll"], sums["targets"]),
        }
        if sums.get("words"):
            measures["pseudo_word_perplexity"] = perplexity(sums["nll"], sums["words"])
        return measures


class PairAccuracy(Task):
    headline = "pair_accuracy"
    data = "a .bin/.idx prefix, made with `lmtrain preprocess --split-sentences`"
    causal = False
    pairs = True

    def __init__(self, settings: MaskedSettings, wrong: str) -> None:
        self.settings, self.id = settings, f"masked/{settings.pairs.replace('_', '-')}"
        self.recipe: dict[str, str] = {  # type: ignore[misc]  # because: the two tasks differ in it
            "text": "runs of sentences of a document that fill seq_len, cut in two",
            "pairs": f"in half of them {wrong}; seed {SEED}",
            "masks": "15 % of the tokens, as in training, whose validation counts alike",
            "denominator": "pairs",
        }

    def prepare(self, source: Path, options: TaskOptions) -> Prepared:
        options.refuse_any_stride(self.id)
        prefix = dataset_prefix(source)
        if prefix is None:
            raise DataError(
                f"--data={source} is not a dataset, but {self.id} needs a dataset. Give a .bin/.idx prefix that "
                "`lmtrain preprocess --split-sentences` has made."
            )
        vocabulary = mask_vocabulary(self, options)
        indexed = open_dataset(prefix, options.tokenizer)
        all_documents = range(indexed.num_documents)
        pairs = PairRequests(MaskedDataset(indexed, all_documents, options.seq_len, vocabulary, self.settings, SEED))
        _, facts = describe_dataset(indexed, map(indexed.document, all_documents), options.tokenizer)
        return Prepared(
            requests=pairs,
            num_targets=pairs.num_targets,
            text_columns={"bytes": np.zeros(pairs.num_targets)},
            facts=Facts(
                protocol=options.protocol_id(self.id),
                num_tokens=indexed.num_tokens,
                prefix="[CLS] before a pair and [SEP] behind each segment",
                stride=None,
                denominator=f"pairs = {pairs.num_targets}",
                **facts | {"notes": facts["notes"] | {"pairs": self.recipe["pairs"], "masks": self.recipe["masks"]}},
            ),
        )

    def measures(self, sums: Sums) -> dict[str, float]:
        return {
            "pair_accuracy": ratio(sums["greedy"], sums["targets"]),
            "nll_per_pair_nats": ratio(sums["nll"], sums["targets"]),
        }


def mask_vocabulary(task: Task, options: TaskOptions) -> MaskVocabulary:
    """Return which token ids of the tokenizer begin a word, continue a word or are special, as the choice of masked
    tokens needs it. Raise UsageError if the window in `options` is too short for `task`.
    """
    if options.seq_len < MIN_SEQ_LEN:
        raise UsageError(f"A window of {options.seq_len} tokens is too short for {task.id}. Use "
                         f"{way('--seq-len', str(MIN_SEQ_LEN))} or more.")  # fmt: skip
    return MaskVocabulary.of(options.tokenizer)


TASKS = (
    MaskedTokens(),
    PseudoPerplexity(),
    PairAccuracy(MaskedSettings(path="text", pairs="sentence_order"), "the two change places"),
    PairAccuracy(MaskedSettings(path="text", pairs="next_sentence"), "the second is of another document"),
)
