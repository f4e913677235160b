"""Predict the next token: the labels are already shifted by the data. Called by parallel."""

from __future__ import annotations

import torch
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.objectives.cross_entropy import cross_entropy_sum, hit_sum
from lmtrain.spec import LanguageModel


class CausalLM:
    terms: tuple[str, ...] = ("lm",)

    def __init__(self) -> None:
        # attributes, so that compiled or vocabulary-parallel ones can take their place
        self.cross_entropy, self.hits = cross_entropy_sum, hit_sum

    def loss_sums(self, model: LanguageModel, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        """[terms], fp32: each term's sum over its valid labels, which the caller divides by the term's global count.

        `model` is the last pipeline stage, and made the hidden states.
        """
        return self.cross_entropy(model.logits(hidden_BTD), batch.labels_BT).unsqueeze(0)

    def valid_sums(self, model: LanguageModel, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        """[2, terms]: the same, and how many of the labels had the highest score."""
        logits_BTV = model.logits(hidden_BTD)
        return torch.stack([of(logits_BTV, batch.labels_BT) for of in (self.cross_entropy, self.hits)]).unsqueeze(1)
