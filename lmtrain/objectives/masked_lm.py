"""Predict the words that were masked and, where samples are pairs, whether the second segment follows the first.

Two terms with counts of their own: a batch has one pair a sample and some hundred masked tokens, and the loss is the
sum of both means. Called by parallel.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from lmtrain.batch import Batch
from lmtrain.objectives.causal_lm import CausalLM
from lmtrain.objectives.cross_entropy import cross_entropy_plain, hit_sum
from lmtrain.spec import LanguageModel, PairModel


class MaskedLM(CausalLM):
    """Masked tokens are a language model's labels; what is added is the pairs."""

    def __init__(self, terms: tuple[str, ...]) -> None:
        super().__init__()
        self.terms = terms

    def loss_sums(self, model: LanguageModel, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        sums = super().loss_sums(model, hidden_BTD, batch)
        if "pair" not in self.terms:
            return sums
        pair = cross_entropy_plain(cast(PairModel, model).pair_logits(hidden_BTD), batch.pair_labels_B)
        return torch.cat([sums, pair.unsqueeze(0)])

    def valid_sums(self, model: LanguageModel, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        sums = super().valid_sums(model, hidden_BTD, batch)
        if "pair" not in self.terms:
            return sums
        logits_B2 = cast(PairModel, model).pair_logits(hidden_BTD)
        pair = torch.stack([of(logits_B2, batch.pair_labels_B) for of in (cross_entropy_plain, hit_sum)])
        return torch.cat([sums, pair.unsqueeze(1)], dim=1)


def build_objective(terms: tuple[str, ...]) -> CausalLM:
    """What a model of these terms learns by."""
    return CausalLM() if terms == CausalLM.terms else MaskedLM(terms)
