"""Predict the next token: the labels are already shifted by the data. Called by parallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.objectives.cross_entropy import cross_entropy_sum, hit_sum


class CausalLM:
    terms: tuple[str, ...] = ("lm",)

    def __init__(self) -> None:
        # attributes, so that compiled or vocabulary-parallel ones can take their place
        self.cross_entropy, self.hits = cross_entropy_sum, hit_sum

    def loss_sums(self, model: Any, batch: Batch) -> Tensor:
        """fp32, each term's sum over its valid labels; the caller divides it by the term's global count."""
        return self.loss_sums_of_hidden(model, model(batch), batch)

    def loss_sums_of_hidden(self, model: Any, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        """The same from the last pipeline stage's hidden states."""
        return self.cross_entropy(model.logits(hidden_BTD), batch.labels_BT).unsqueeze(0)

    def valid_sums(self, model: Any, batch: Batch) -> Tensor:
        """[2, terms]: the same, and how many of the labels had the highest score."""
        return self.valid_sums_of_hidden(model, model(batch), batch)

    def valid_sums_of_hidden(self, model: Any, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        logits_BTV = model.logits(hidden_BTD)
        return torch.stack([of(logits_BTV, batch.labels_BT) for of in (self.cross_entropy, self.hits)]).unsqueeze(1)
