"""Hidden states to scores over the vocabulary. Called by GPT.logits; its weight may be the embedding's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Head(nn.Linear):
    """Columns that pad the vocabulary score -inf: they are never predicted and their rows never get a gradient."""

    def __init__(self, width: int, vocab_size: int, padded_vocab_size: int) -> None:
        super().__init__(width, padded_vocab_size, bias=False)
        self.vocab_size = vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self._padding())

    def _padding(self) -> Tensor | None:
        """0 for true tokens, -inf for padding.

        because: as a bias it rides along in the product's own kernel; filling the columns afterwards would cost a
        copy of all logits forward and another backward.
        """
        num_columns = self.weight.shape[0]
        if num_columns == self.vocab_size:
            return None
        columns = torch.arange(num_columns, device=self.weight.device)
        return self.weight.new_zeros(num_columns).masked_fill(columns >= self.vocab_size, float("-inf"))
