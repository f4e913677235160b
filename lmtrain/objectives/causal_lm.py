"""Predict the next token: the labels are already shifted by the data. Called by parallel."""

from __future__ import annotations

import torch
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.objectives.cross_entropy import cross_entropy_sum, hit_sum
from lmtrain.spec import LanguageModel


class CausalLM:
    terms: tuple[str, ...] = ("lm",)
    rows_vary = False  # whether one microbatch may have more to score than another

    def __init__(self) -> None:
        # attributes, so that compiled or vocabulary-parallel ones can take their place
        self.cross_entropy, self.hits = cross_entropy_sum, hit_sum

    def prepared(self, batch: Batch) -> Batch:
        """What the last stage is given, from what lies on the host: nothing waits for the device there."""
        return batch

    def scored(self, hidden_BTD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The hidden states of which logits are made, and the labels of these: here of all positions."""
        return hidden_BTD, batch.labels_BT

    def loss_sums(self, model: LanguageModel, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        """[terms], fp32: each term's sum over its valid labels, which the caller divides by the term's global count.

        `model` is the last pipeline stage, and made the hidden states.
        """
        hidden, labels = self.scored(hidden_BTD, batch)
        return self.cross_entropy(model.logits(hidden), labels).unsqueeze(0)

    def valid_sums(self, model: LanguageModel, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        """[2, terms]: the same, and how many of the labels had the highest score."""
        hidden, labels = self.scored(hidden_BTD, batch)
        logits = model.logits(hidden)
        return torch.stack([of(logits, labels) for of in (self.cross_entropy, self.hits)]).unsqueeze(1)
