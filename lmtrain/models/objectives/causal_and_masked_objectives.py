"""The training objectives: next-token prediction, or for an encoder masked tokens and the order of a sentence pair.

Labels are already shifted by the data. An encoder's two terms are divided by separate counts: a batch has a pair per
sample and some hundred masked tokens, and the loss is the sum of both means. About one position in seven has a label,
and only labelled positions are scored. Called by parallel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.batch import IGNORED, Batch
from lmtrain.models.objectives.cross_entropy import count_hits, cross_entropy_plain, cross_entropy_sum
from lmtrain.spec import LanguageModel, PairModel


class CausalLM:
    """The next-token objective."""

    terms: tuple[str, ...] = ("lm",)
    rows_vary = False  # True if the number of scored positions may differ between micro-batches

    def __init__(self, z_loss: float = 0.0) -> None:
        self.z_loss = z_loss  # factor of the mean of log(sum(exp(logits)))^2, which is minimised beside the terms
        # attributes, so that `parallel` can replace them by compiled or vocabulary-parallel functions
        self.cross_entropy, self.hits = cross_entropy_sum, count_hits

    @property
    def num_sums(self) -> int:
        """The number of sums that are minimised: the terms', and the z-loss if there is one."""
        return len(self.terms) + (self.z_loss > 0)

    def counts_of_sums(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number by which each sum of `loss_sums` is divided. `counts` are those of the terms' labels; the
        z-loss is a mean over the first term's.
        """
        return counts + counts[: self.num_sums - len(self.terms)]

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the batch with everything that the loss needs, computed on the host to avoid device synchronization.
        """
        return batch

    def select_scored(self, hidden_BTD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the hidden states that need logits, and their labels: here those of all positions."""
        return hidden_BTD, batch.labels_BT

    def loss_sums(self, model: LanguageModel, hidden_BTD: Tensor, batch: Batch, num_samples: int = 0) -> Tensor:
        """Return [num_sums] in fp32: each term's sum over its valid labels, then the z-loss's, if there is one. Each is
        to be divided by its global count.

        `model` is the last pipeline stage, which computed the hidden states. With `num_samples`, the batch's number of
        samples, the term's part of each sample follows, which gets no gradient; this objective alone supports it.
        """
        hidden, labels = self.select_scored(hidden_BTD, batch)
        return self.cross_entropy(model.logits(hidden), labels, num_samples=num_samples, z_loss=self.z_loss).view(-1)

    def validation_sums(self, model: LanguageModel, hidden_BTD: Tensor, batch: Batch, num_samples: int = 0) -> Tensor:
        """Return [2, loss terms] for a batch: row 0 has each term's summed loss, row 1 the number of its labels that
        the model predicts, those whose logit is the highest. `hidden_BTD` are the hidden states that `model`, the last
        pipeline stage, has computed. With `num_samples`, the number of samples, the same follows for each sample alone,
        as further columns.
        """
        hidden, labels = self.select_scored(hidden_BTD, batch)
        logits = model.logits(hidden)
        scores = [function(logits, labels, num_samples=num_samples) for function in (self.cross_entropy, self.hits)]
        return torch.stack([score.view(-1) for score in scores])


class MaskedLM(CausalLM):
    """BERT's objective: masked-token loss, plus the sentence-pair loss if `pair` is among the terms.

    If ranks shard the sequence, `num_shards` is the number of shards and `shard_index` the index of this rank's shard.
    """

    rows_vary = True

    def __init__(self, terms: tuple[str, ...]) -> None:
        super().__init__()
        self.terms = terms
        self.num_shards, self.shard_index = 1, 0

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the batch with `scored_positions_K`, the indices in the flattened [B, T] of the positions that have a
        label, and `scored_labels_K`, their labels. If ranks shard the sequence, the indices are those in this rank's
        shard, padded to equally many on every rank, and the labels those of all shards in order.

        Padding repeats the shard's position 0 with the label IGNORED.
        """
        label_shards = [labels.flatten() for labels in batch.labels_BT.chunk(self.num_shards, dim=1)]
        labels_by_shard = [labels[labels != IGNORED] for labels in label_shards]
        num_scored = max(1, *map(len, labels_by_shard))  # because: not every kernel accepts an input without rows
        positions_K = (label_shards[self.shard_index] != IGNORED).nonzero().squeeze(1)
        padded = [F.pad(labels, (0, num_scored - len(labels)), value=IGNORED) for labels in labels_by_shard]
        positions_K = F.pad(positions_K, (0, num_scored - len(positions_K)))
        return replace(batch, scored_positions_K=positions_K, scored_labels_K=torch.cat(padded))

    def select_scored(self, hidden_BTD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (hidden states [1, K, D] of the positions that have a label, their labels [1, K]). For a batch that
        was not prepared by `prepare_batch`, return those of all positions.

        With sequence shards the labels are those of all shards in order, as a head that gathers the sequence needs
        them.
        """
        if batch.scored_positions_K is None:
            return super().select_scored(hidden_BTD, batch)
        hidden_KD = hidden_BTD.flatten(0, 1).index_select(0, batch.scored_positions_K)
        return hidden_KD.unsqueeze(0), batch.scored_labels_K.unsqueeze(0)

    def loss_sums(self, model: LanguageModel, hidden_BTD: Tensor, batch: Batch, num_samples: int = 0) -> Tensor:
        assert not num_samples, "masked samples are never blended"
        sums = super().loss_sums(model, hidden_BTD, batch)
        if "pair" not in self.terms:
            return sums
        pair = cross_entropy_plain(cast(PairModel, model).pair_logits(hidden_BTD), batch.pair_labels_B)
        return torch.cat([sums, pair.unsqueeze(0)])

    def validation_sums(self, model: LanguageModel, hidden_BTD: Tensor, batch: Batch, num_samples: int = 0) -> Tensor:
        assert not num_samples, "masked samples are never blended"
        sums = super().validation_sums(model, hidden_BTD, batch)
        if "pair" not in self.terms:
            return sums
        logits_B2 = cast(PairModel, model).pair_logits(hidden_BTD)
        pair = torch.stack([function(logits_B2, batch.pair_labels_B) for function in (cross_entropy_plain, count_hits)])
        return torch.cat([sums, pair.unsqueeze(1)], dim=1)


def build_objective(terms: tuple[str, ...], z_loss: float = 0.0) -> CausalLM:
    """Return the objective of a model with these loss terms. `z_loss` is the factor of a decoder's z-loss."""
    return CausalLM(z_loss) if terms == CausalLM.terms else MaskedLM(terms)
