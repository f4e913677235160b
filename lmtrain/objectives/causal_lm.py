"""Predict the next token: the labels are already shifted by the data. Called by parallel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.objectives.cross_entropy import cross_entropy_sum


class CausalLM:
    def __init__(self) -> None:
        # an attribute, so that a compiled or a vocabulary-parallel one can take its place
        self.cross_entropy = cross_entropy_sum

    def loss_sum(self, model: Any, batch: Batch) -> Tensor:
        """fp32, summed over the batch's valid labels; the caller divides by the global count."""
        return self.loss_sum_of_hidden(model, model(batch), batch)

    def loss_sum_of_hidden(self, model: Any, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        """The same from the last pipeline stage's hidden states."""
        return self.cross_entropy(model.logits(hidden_BTD), batch.labels_BT)
