"""The output heads: hidden states to vocabulary logits, with a weight that may be tied, and to two logits for a pair.

Called by a model's logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.kernels.activations import Activation
from lmtrain.models.layers.block import ACTIVATIONS


class Head(nn.Linear):
    """The output linear. Padding columns are -inf: they are never predicted and their rows get no gradient."""

    def __init__(self, width: int, vocab_size: int, padded_vocab_size: int, *, bias: bool = False) -> None:
        super().__init__(width, padded_vocab_size, bias=bias)
        self.vocab_size = vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, padded_bias(self.weight, self.bias, self.vocab_size))


def padded_bias(weight: Tensor, bias: Tensor | None, num_tokens: int) -> Tensor | None:
    """Return the bias to add to a vocabulary head's logits: `bias` (None: zeros) with -inf for the rows of `weight`
    from `num_tokens` on, which pad the vocabulary. Without such rows return `bias` itself, which may be None.

    because: as a bias the -inf is part of the product's own kernel; filling the columns afterwards would cost a copy of
    all logits in forward and another in backward
    """
    num_rows = weight.shape[0]
    if num_tokens >= num_rows:
        return bias
    rows = torch.arange(num_rows, device=weight.device)
    return (weight.new_zeros(num_rows) if bias is None else bias).masked_fill(rows >= num_tokens, float("-inf"))


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    """Return cap x tanh(logits / cap); -inf at padding stays -inf."""
    return torch.where(logits == float("-inf"), logits, cap * torch.tanh(logits / cap))


class MaskedHead(nn.Module):
    """BERT's head: a linear, gelu and norm before the logits."""

    def __init__(
        self, norm: nn.Module, width: int, vocab_size: int, padded_vocab_size: int, activation: Activation = "gelu"
    ) -> None:
        super().__init__()
        self.activation = activation
        self.dense = nn.Linear(width, width)
        self.norm = norm
        self.decoder = Head(width, vocab_size, padded_vocab_size, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.norm(ACTIVATIONS[self.activation](self.dense(hidden))))
        return logits


class PairHead(nn.Module):
    """The pair classifier, which reads the first token's hidden state: does the second segment follow the first?"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pooler = nn.Linear(width, width)
        self.scores = nn.Linear(width, 2)
        self.first_token_output = FirstTokenOutput()

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        # because: a view of the first tokens would keep the hidden states of all other tokens until backward
        pooled_BD = torch.tanh(self.pooler(hidden_BTD[:, 0].contiguous()))
        logits_B2: Tensor = self.first_token_output(self.scores(pooled_BD))
        return logits_B2


class FirstTokenOutput(nn.Identity):
    """An identity that marks a value computed from the first token of a sequence.

    If ranks shard the sequence, only the first rank's value is right, and parallel broadcasts it to the others.
    """
