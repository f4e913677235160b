"""Samples for masked language models: pairs of sentence runs with masked words. numpy only.

Called by the loader. group_sentences_into_samples.py decides which sentences form a sample,
masked_samples_python_fallback.py how it is made; csrc/masked.cpp does the same arithmetic if it was compiled. A sample
is a pure function of the seed and its number. Numbers continue through the epochs (number // num_samples is the epoch),
so that each epoch masks the same sentences anew. This file must not know steps, ranks or torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lmtrain.batch import Batch
from lmtrain.data.data_settings import MaskedSettings
from lmtrain.data.sample_dataset_interface import Counts, Int64s, ShuffledOrder
from lmtrain.data.samples.group_sentences_into_samples import build_map, build_megatron_map
from lmtrain.data.samples.masked_samples_python_fallback import (
    BEGINS,
    CONTINUES,
    SPECIAL,
    MaskedSamplerTwin,
    Pairs,
    Sentences,
)
from lmtrain.data.store.document_boundaries import DocumentMap, index_identity
from lmtrain.data.store.index_cache import Index, IndexBuild, IndexCache, all_within, cache_if
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.errors import DataError, SettingsError, way
from lmtrain.runtime import compiled_helpers
from lmtrain.runtime.derive_random_seeds import derive_seed

_MIN_SEQ_LEN = 8
_CHUNK = 1 << 20
_CACHED_FROM = 1 << 26  # sentences; because: building the map of fewer sentences takes less than half a second


class MaskingTokenizer(Protocol):
    """Interface that masking requires of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special(self) -> dict[str, int]: ...
    def piece(self, token: int) -> str: ...


@dataclass(frozen=True)
class MaskVocabulary:
    """Vocabulary facts for masking: which ids begin a word, continue a word (##), or are special."""

    kinds: NDArray[np.uint8]
    special: dict[str, int]

    @classmethod
    def of(cls, tokenizer: MaskingTokenizer) -> MaskVocabulary:
        """Read from a tokenizer which ids begin a word, continue a word or are special. Raise DataError if it lacks
        [CLS], [SEP], [MASK] or [PAD].
        """
        missing = [role for role in ("cls", "sep", "mask", "pad") if role not in tokenizer.special]
        if missing:
            names = ", ".join(f"[{role.upper()}]" for role in missing)
            raise DataError(
                f"The tokenizer has no {names}, which masked samples need. Give a WordPiece vocabulary, as of `lmtrain "
                "tokenizer train --kind wordpiece`, and preprocess the text again with --split-sentences."
            )
        pieces = map(tokenizer.piece, range(tokenizer.vocab_size))
        kinds = np.array([CONTINUES if piece.startswith("##") else BEGINS for piece in pieces], np.uint8)
        kinds[list(tokenizer.special.values())] = SPECIAL
        return cls(kinds, dict(tokenizer.special))


class MaskedDataset:
    """Dataset of masked samples. `run_samples`, for order=megatron only: samples of the whole run; None: one epoch."""

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        seq_len: int,
        vocabulary: MaskVocabulary,
        settings: MaskedSettings,
        seed: int,
        run_samples: int | None = None,
        cache: IndexCache | None = None,
    ) -> None:
        if seq_len < _MIN_SEQ_LEN:
            raise SettingsError([
                f"A sequence length of {seq_len} tokens has no room for two segments with [CLS] and [SEP]. "
                f"Use {way(f'model.seq_len={_MIN_SEQ_LEN}')} or more."
            ])
        DocumentMap.of(indexed, cache)  # to check every entry of the .idx
        self.prefix, self.documents, self.seq_len, self.settings = indexed.prefix, documents, seq_len, settings
        self._bounds = indexed.document_index[documents.start : documents.stop + 1]
        self._require_sentences(indexed)
        self._indexed = indexed
        self._rows = self._get_sample_map(indexed, seed, run_samples, cache)
        sentences = Sentences(indexed.tokens, indexed.lengths, indexed.pointers, self._bounds, self._rows)
        self._sampler = build_sampler(sentences, vocabulary, settings, seq_len, seed)

    @property
    def num_samples(self) -> int:
        return len(self._rows)

    def counts(self, sample_ids: Int64s) -> Counts:
        """Count labels (tokens to predict) and tokens (including [CLS] and [SEP])."""
        [sizes] = self._call_sampler(self._sampler.counts, sample_ids)
        return Counts(*sizes.sum(axis=0).tolist())

    def batch(self, sample_ids: Int64s) -> Batch:
        tokens_BT, labels_BT, segments_BT, not_padding_BT, pair_labels_B = self._call_sampler(
            self._sampler.batch, sample_ids
        )
        if self.settings.pairs == "none":
            return Batch(tokens_BT, labels_BT, not_padding_BT=not_padding_BT)
        return Batch(
            tokens_BT, labels_BT, segments_BT=segments_BT, not_padding_BT=not_padding_BT, pair_labels_B=pair_labels_B
        )

    def _call_sampler(self, method: Any, sample_ids: Int64s) -> Any:
        """Call `method` of the sampler with these sample ids and return the list of its results without the last one,
        which lists the token runs that it read: these are compared with their block checksums.

        Raise DataError if an id in the file is outside the vocabulary.
        """
        ids = np.ascontiguousarray(sample_ids, np.int64)
        try:
            *result, runs = method(ids)
            self._indexed.check(*runs)
            return result
        except IndexError as wrong_id:  # because: without this check the id would crash later without naming the file
            self._indexed.check(*self._sampler.runs(ids))
            raise DataError(
                f"{self.prefix}.bin is damaged or was made with another tokenizer: {wrong_id}. "
                "Make the dataset again with the tokenizer of the model."
            ) from wrong_id

    @property
    def _max_text_tokens(self) -> int:
        """Tokens of text per sample: all but [CLS] and one [SEP] per segment. Megatron-LM always counts two."""
        return self.seq_len - (2 if self.settings.pairs == "none" and self.settings.order == "own" else 3)

    def _require_sentences(self, indexed: IndexedDataset) -> None:
        """Raise DataError if every document is a single sequence, which means that it was not split into sentences.
        Such documents are accepted only if samples are not sentence pairs and each document fits into one sample.
        """
        counts = np.diff(self._bounds)
        if len(counts) > 0 and counts.max() == 1:
            longest = int(indexed.lengths[int(self._bounds[0]) : int(self._bounds[-1])].max())
            if self.settings.pairs != "none" or longest > self._max_text_tokens:
                way_out = "Preprocess the text again with --split-sentences."
                if self.settings.text is not None:
                    way_out = "Give a text with several sentences in a document, which end with a full stop, ! or ?."
                raise DataError(
                    f"{self.prefix} has only one sequence per document (the longest has {longest} tokens), but samples "
                    f"are built from sentences. {way_out}"
                )

    def _get_sample_map(
        self, indexed: IndexedDataset, seed: int, run_samples: int | None, cache: IndexCache | None
    ) -> NDArray[Any]:
        """Return the sample map, an array [num_samples, 3] of (first sentence, one past the last, target number of
        tokens), from the cache or newly built. `run_samples`, used with data.order=megatron only, is the number of
        samples of the run. Raise DataError if the documents give too few samples.
        """
        settings = self.settings
        shape: dict[str, Any] = {
            "max_tokens": self._max_text_tokens, "short_share": settings.short_share,
            "min_sentences": settings.min_sentences,
        }  # fmt: skip
        build: Callable[..., NDArray[Any]]
        if settings.order == "megatron":
            build, shape = build_megatron_map, shape | {"seed": seed, "num_samples": run_samples}
        else:
            build, shape = build_map, shape | {"seed": derive_seed(seed, "sentence pairs")}

        def fill(index: IndexBuild) -> dict[str, Any]:
            rows = build(indexed.lengths, self._bounds, **shape)
            index.create("rows", rows.dtype.str, rows.size)[:] = rows.ravel()
            return {}

        inputs = shape | {"order": settings.order, "documents": [self.documents.start, self.documents.stop]}
        index = cache_if(indexed.num_sequences >= _CACHED_FROM, cache).get(
            "sentences", lambda: inputs | index_identity(indexed), fill,
            lambda index: _in_range(index, self._bounds, self._max_text_tokens),
        )  # fmt: skip
        rows = index.arrays["rows"].reshape(-1, 3)
        if len(rows) == 0:
            raise DataError(
                f"data.split gives 0 samples: none of its {len(self.documents)} documents of {self.prefix} has "
                f"{self.settings.min_sentences} sentences. Give more data or a larger share of data.split."
            )
        is_single_document = rows[-1, 0] < self._bounds[np.searchsorted(self._bounds, rows[0, 0], side="right")]
        if self.settings.pairs == "next_sentence" and is_single_document:
            raise DataError(
                f"data.pairs=next_sentence needs sentences of two documents, but only one document of {self.prefix} in "
                f"this part of data.split has samples. Give more data, or {way('data.pairs=sentence_order')}."
            )
        return rows


def build_sampler(
    sentences: Sentences, vocabulary: MaskVocabulary, settings: MaskedSettings, seq_len: int, seed: int
) -> Any:
    """Return a sampler that makes masked samples by number: the compiled `MaskedSampler`, or the Python
    `MaskedSamplerTwin` with the same methods if nothing was compiled or the tokens' dtype is not supported.
    """
    # because: the compiled sampler reads only the two dtypes that lmtrain writes, of one file; the twin reads any
    is_supported = isinstance(sentences.tokens, np.ndarray) and sentences.tokens.dtype in (np.uint16, np.int32)
    lib = compiled_helpers.lib if is_supported else None
    build: Any = MaskedSamplerTwin if lib is None else lib.MaskedSampler
    kinds = vocabulary.kinds
    if not settings.whole_word:
        kinds = np.where(kinds == CONTINUES, np.uint8(BEGINS), kinds)
    return build(
        **vars(sentences),
        kinds=kinds,
        specials=np.flatnonzero(kinds == SPECIAL).tolist(),
        cls=vocabulary.special["cls"],
        sep=vocabulary.special["sep"],
        mask=vocabulary.special["mask"],
        pad=vocabulary.special["pad"],
        seq_len=seq_len,
        pairs=Pairs[settings.pairs],
        share=min(round(settings.mask_share * 2**32), 2**32 - 1),
        max_predictions=settings.max_predictions or seq_len,
        ngram_thresholds=ngram_thresholds(settings.max_ngram),
        seed=derive_seed(seed, "masks"),
    )


def _in_range(index: Index, bounds: NDArray[Any], max_tokens: int) -> bool:
    """Return True if every row of a cached sample map is valid: its sentences are within the documents, and its target
    number of tokens is 2 to max_tokens. `bounds` are the first sentence of each document, and the end.
    """
    rows = index.arrays["rows"].reshape(-1, 3)
    parts = (rows[i : i + _CHUNK] for i in range(0, len(rows), _CHUNK))
    return all(
        bool((part[:, 0] < part[:, 1]).all()) and all_within(part[:, 0], int(bounds[0]), int(bounds[-1]))
        and all_within(part[:, 1], 1, int(bounds[-1])) and all_within(part[:, 2], 2, max_tokens)
        for part in parts
    )  # fmt: skip


def ngram_thresholds(max_ngram: int) -> list[int]:
    """Return thresholds for drawing an n-gram length n with weight 1/n: n is 1 + how many a 32-bit draw reaches."""
    weights = [Fraction(1, n) for n in range(1, max_ngram + 1)]
    return [int(sum(weights[:n]) / sum(weights) * 2**32) for n in range(1, max_ngram)]


class ContinuingOrder(ShuffledOrder):
    """Order of masked samples with data.order=own: numbers continue through the epochs, so that each epoch masks the
    same sentences anew. Epoch e has e*n to (e+1)*n - 1, each once.
    """

    def ids(self, first: int, count: int) -> Int64s:
        epochs = np.arange(first, first + count) // self.num_samples
        return super().ids(first, count) + epochs * self.num_samples
