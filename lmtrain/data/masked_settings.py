"""How BERT's samples are made of a dataset of sentences. Torch-free; found by conf/data/masked.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lmtrain.config.base import Problem
from lmtrain.data.data_settings import DataSettings


@dataclass(frozen=True, kw_only=True)
class MaskedSettings(DataSettings):
    """One dataset made with --split-sentences: pairs of runs of sentences, with words masked."""

    kind = "masked"

    pairs: Literal["sentence_order", "next_sentence", "none"] = "sentence_order"
    min_sentences: int = 2
    short_share: float = 0.1
    mask_share: float = 0.15
    max_predictions: int | None = None
    whole_word: bool = True
    max_ngram: int = 1

    @property
    def terms(self) -> tuple[str, ...]:
        return ("mlm",) if self.pairs == "none" else ("mlm", "pair")

    def scored_share(self, seq_len: int) -> float:
        return min(self.mask_share, (self.max_predictions or seq_len) / seq_len)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides, beside the dataset and the seed, how a sample is cut and masked."""
        keys = ("pairs", "min_sentences", "short_share", "mask_share", "max_predictions", "whole_word", "max_ngram")
        return {key: getattr(self, key) for key in keys}

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        least = 1 if self.pairs == "none" else 2
        unknown = "has no meaning with masked samples"
        yield from self.checked(
            (self.document_mask, "document_mask", unknown, "Leave it out."),
            (self.packing != "concatenate", "packing", unknown, "Leave it out."),
            (self.min_sentences < least, "min_sentences",
             f"must be at least {least} with pairs={self.pairs}", f"Use {least}."),
            (not 0 <= self.short_share <= 1, "short_share", "must lie in 0..1", "Use 0.1."),
            (not 0 < self.mask_share < 1, "mask_share", "must lie between 0 and 1", "Use 0.15."),
            self.at_least(1, "max_predictions", "Use null for no limit."),
            (not 1 <= self.max_ngram <= 16, "max_ngram", "must lie in 1..16", "Use 1 or 3."),
            (self.order == "megatron" and self.pairs == "next_sentence", "order",
             "knows pairs=sentence_order and pairs=none only, as Megatron-LM does", "Use order=own."),
        )  # fmt: skip
