"""What a model learns by: the next token or, for an encoder, the words that were masked and the order of a pair.

Labels are already shifted by the data. An encoder's two terms have counts of their own: a batch has one pair a sample
and some hundred masked tokens, and the loss is the sum of both means. Of seven positions about one has a label, and
these alone are scored. Called by parallel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.batch import IGNORED, Batch
from lmtrain.objectives.cross_entropy import cross_entropy_plain, cross_entropy_sum, hit_sum
from lmtrain.spec import LanguageModel, PairModel


class CausalLM:
    """Predict the next token."""

    terms: tuple[str, ...] = ("lm",)
    rows_vary = False  # whether one microbatch may have more to score than another

    def __init__(self) -> None:
        # attributes, so that compiled or vocabulary-parallel ones can take their place
        self.cross_entropy, self.hits = cross_entropy_sum, hit_sum

    def prepared(self, batch: Batch) -> Batch:
        """Return the batch for the last stage, prepared on the host without device synchronization."""
        return batch

    def scored(self, hidden_BTD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the hidden states that are scored and their labels: here of all positions."""
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


class MaskedLM(CausalLM):
    """Masked tokens are a language model's labels; what is added is the pairs.

    Where ranks hold a cut of the sequence each, there are `num_cuts` of them, and this rank's is number `cut`.
    """

    rows_vary = True

    def __init__(self, terms: tuple[str, ...]) -> None:
        super().__init__()
        self.terms = terms
        self.num_cuts, self.cut = 1, 0

    def prepared(self, batch: Batch) -> Batch:
        """Return the batch with its labelled positions, equally many in each part; padding has no labels."""
        cuts = [labels.flatten() for labels in batch.labels_BT.chunk(self.num_cuts, dim=1)]
        kept = [labels[labels != IGNORED] for labels in cuts]
        most = max(1, *map(len, kept))  # because: not every kernel knows what to do with no rows
        mine = (cuts[self.cut] != IGNORED).nonzero().squeeze(1)
        labels_K = torch.cat([F.pad(labels, (0, most - len(labels)), value=IGNORED) for labels in kept])
        return replace(batch, scored_K=F.pad(mine, (0, most - len(mine))), scored_labels_K=labels_K)

    def scored(self, hidden_BTD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the scored states as one row, in the order in which a head gathers the parts of a sequence."""
        if batch.scored_K is None:
            return super().scored(hidden_BTD, batch)
        hidden_KD = hidden_BTD.flatten(0, 1).index_select(0, batch.scored_K)
        return hidden_KD.unsqueeze(0), batch.scored_labels_K.unsqueeze(0)

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
    """Return the objective of a model with these terms."""
    return CausalLM() if terms == CausalLM.terms else MaskedLM(terms)
