"""Cuts opened datasets into samples as the data settings say: which documents to train on, and which to hold out.

Called by assemble_training_data.py. Torch-free; must not know what the samples are used for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lmtrain.data.data_settings import BlendSettings, DataChoice, MaskedSettings
from lmtrain.data.resume_position_by_source import KEY_DIGITS, NOTHING_READ, DataHistory
from lmtrain.data.sample_dataset_interface import Dataset, SampleOrder, ShuffledOrder
from lmtrain.data.samples.causal_language_samples import CausalDataset
from lmtrain.data.samples.masked_language_samples import (
    ContinuingOrder,
    MaskedDataset,
    MaskingTokenizer,
    MaskVocabulary,
)
from lmtrain.data.samples.megatron_sample_order import MegatronDataset, SequentialOrder, split_sequences
from lmtrain.data.samples.packing import PackedDataset
from lmtrain.data.store.document_boundaries import DocumentMap, index_folder, split_documents, split_tokens
from lmtrain.data.store.index_cache import IndexCache
from lmtrain.data.store.indexed_dataset import IndexedDataset
from lmtrain.errors import SettingsError, way

# Rules for applying data.split. "tokens": the validation share is held out, counted in tokens. "read" (older): the
# same, counted in documents. "all" (oldest): every share but the first is held out, whether anything reads it or not.
# A resumed run keeps the rule it began with.
TOKEN_SHARES, READ_SHARES, ALL_SHARES = SHARES = "tokens", "read", "all"


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


class DatasetBuilder:
    """Builder of sample datasets from document ranges, according to the settings."""

    def __init__(self, settings: DataChoice, requirements: DataRequirements, *, reads_valid: bool) -> None:
        """Set up the builder. `reads_valid`: whether validation would read a share of the training datasets."""
        self.settings, self.requirements = settings, requirements
        self.held_out_before = requirements.history.held_out_before_stage(requirements.first_position)
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

    def document_map(self, indexed: IndexedDataset) -> DocumentMap:
        return DocumentMap.of(indexed, self.cache(indexed))

    def split_ranges(self, indexed: IndexedDataset) -> Sequence[range]:
        """Return the ranges of a dataset's document numbers by data.split: the first is for training, the second for
        validation; there may be a third, for test, which lmtrain does not use. With data.order=megatron, unless samples
        are masked, they are ranges of sequence numbers.
        """
        if self.megatron:
            return split_sequences(len(self.full_range(indexed)), self.split)
        if self.shares != TOKEN_SHARES or not self.share:
            return split_documents(indexed.num_documents, self.split)
        return split_tokens(self.document_map(indexed), self.share, self.min_documents)

    def full_range(self, indexed: IndexedDataset) -> range:
        """Return the whole range to split: sequences for Megatron-LM's concatenated text, documents otherwise."""
        return range(indexed.num_sequences if self.by_sequence else indexed.num_documents)

    def count_tokens(self, indexed: IndexedDataset, documents: range) -> int:
        """Return the number of tokens in a range of document numbers, as `split_ranges` gives it. With
        data.order=megatron, unless samples are masked, it is a range of sequence numbers.
        """
        if documents == self.full_range(indexed):
            return indexed.num_tokens
        if self.by_sequence:
            return indexed.count_tokens(documents)
        map_ = self.document_map(indexed)
        return map_.start(documents.stop) - map_.start(documents.start)

    def build_domains(self, valid: Sequence[IndexedDataset]) -> dict[str, Dataset]:
        """Return domain name -> validation samples for each domain of data.valid_paths, {} if that is not set. `valid`
        are the opened datasets of the domains, in the order of the setting; all documents of each are used.
        """
        paths = self.settings.valid_paths
        return {
            name: self.build_dataset(indexed, self.full_range(indexed), None)
            for name, indexed in zip(paths, valid if paths else (), strict=True)
        }

    def training_range(self, indexed: IndexedDataset) -> range:
        """Return the range of a dataset's document numbers to train on: the training range of `split_ranges`, ended
        before the first document that an earlier stage of the run held out for validation. Raise SettingsError if none
        is left, or if an earlier stage only validated on this dataset. With data.train_on_held_out=true, return the
        whole training range.
        """
        documents = self.split_ranges(indexed)[0]
        if self.settings.train_on_held_out:
            return documents
        content = indexed.content_digest[:KEY_DIGITS]
        if content in self.held_out_before.validated:
            raise SettingsError([
                f"{indexed.prefix} was validated on in an earlier stage of this run, so training on it would make that "
                f"loss meaningless. Give other data, or add {way('data.train_on_held_out=true')}."
            ])
        stop = min(documents.stop, self.held_out_before.documents.get(content, documents.stop))
        held_out_token = self.held_out_before.tokens.get(content)
        if held_out_token is not None and not self.is_concatenated:
            # because: other samples are of whole documents, so the one that was cut is left out
            start_of = self.document_map(indexed).start
            stop = documents.start - 1 + bisect_right(
                range(documents.start, stop + 1), held_out_token, key=start_of
            )  # fmt: skip
        if documents and stop <= documents.start:
            raise SettingsError([
                f"All of {indexed.prefix} that this stage would train on was held out for validation by an earlier "
                f"stage of this run. Give other data, or add {way('data.train_on_held_out=true')}."
            ])
        return range(documents.start, stop)

    def training_tokens(self, indexed: IndexedDataset, documents: range, tokens: range | None = None) -> range | None:
        """Return the range of the dataset's tokens to train on; None means all tokens of `documents`. `tokens` is the
        range that this stage would use; tokens at the end of the dataset that an earlier stage of the run held out for
        validation are removed from it.
        """
        held_out = self.held_out_before.tokens.get(indexed.content_digest[:KEY_DIGITS])
        if held_out is None or self.settings.train_on_held_out:
            return tokens
        if tokens is not None:
            return range(tokens.start, min(tokens.stop, held_out))
        return range(self.document_map(indexed).start(documents.start), held_out)

    def build_order(self, dataset: Dataset, seed: int | None = None) -> SampleOrder:
        """Return the order in which training reads a dataset's samples: shuffled anew in each epoch by `seed` (None:
        the run's seed), or with data.order=megatron as they are, because then the dataset itself is shuffled.
        """
        seed = self.requirements.seed if seed is None else seed
        if self.megatron:
            return SequentialOrder(dataset.num_samples)
        kind = ContinuingOrder if isinstance(dataset, MaskedDataset) else ShuffledOrder
        return kind(dataset.num_samples, seed)

    def build_dataset(
        self, indexed: IndexedDataset, documents: range, num_samples: int | None, tokens: range | None = None
    ) -> Dataset:
        """Return the samples of these documents of a dataset, of the kind that the data settings choose: masked,
        Megatron-LM's, concatenated or packed. `num_samples` is used with data.order=megatron only (None: one epoch).
        `tokens` restricts concatenated samples to a range of the dataset's tokens, if documents are split between
        training and validation.
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
