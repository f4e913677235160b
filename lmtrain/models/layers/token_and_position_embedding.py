"""The embedding: token ids to the first hidden states. Called by a model's forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmtrain.batch import Batch


class Embedding(nn.Module):
    """Token embedding times `scale`, plus a table of `num_positions` learned positions if that is given; rotary models
    have none.
    """

    def __init__(
        self,
        padded_vocab_size: int,
        width: int,
        *,
        num_positions: int | None,
        dropout: float,
        num_segments: int = 0,
        norm: nn.Module | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.token = _table(padded_vocab_size, width)
        self.position = _table(num_positions, width) if num_positions is not None else None
        self.segment = _table(num_segments, width) if num_segments else None
        self.norm = norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch: Batch) -> Tensor:
        x_BTD: Tensor = self.token(batch.tokens_BT)
        if self.scale != 1.0:
            x_BTD = x_BTD * self.scale
        if self.position is not None:
            x_BTD = x_BTD + self.position(positions_of(batch))
        if self.segment is not None:
            x_BTD = x_BTD + self.segment(segments_of(batch))
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        dropped_BTD: Tensor = self.dropout(x_BTD)
        return dropped_BTD


def _table(num_rows: int, width: int) -> nn.Embedding:
    # because: on the meta device nn.Embedding's own initialization imports torch's reference functions: two seconds
    table: nn.Embedding = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
        torch.zeros(num_rows, width), freeze=False
    )
    return table


def positions_of(batch: Batch) -> Tensor:
    """Return positions: [B, T] if they restart within a row, else [T] as 0, 1, 2, ..."""
    positions: Tensor | None = batch.positions_BT
    return torch.arange(batch.tokens_BT.shape[1], device=batch.tokens_BT.device) if positions is None else positions


def text_lengths_of(batch: Batch) -> int | Tensor:
    """Return how many tokens the text of each token has, whatever else is in its row: [B, T], or [B, 1] if each row has
    one text, or a number if all rows are full. Each run of consecutive positions is a text, and padding is none.
    """
    width = int(batch.tokens_BT.shape[1])
    if batch.positions_BT is None:
        return width if batch.not_padding_BT is None else batch.not_padding_BT.sum(1, keepdim=True)
    is_first_BT = torch.ones_like(batch.positions_BT, dtype=torch.bool)
    is_first_BT[:, 1:] = batch.positions_BT[:, 1:] != batch.positions_BT[:, :-1] + 1
    places_T = torch.arange(width, device=batch.positions_BT.device)
    first_BT = torch.where(is_first_BT, places_T, 0).cummax(1).values
    stop_BT = torch.full_like(first_BT, width)
    stop_BT[:, :-1] = torch.where(is_first_BT, places_T, width)[:, 1:].flip(1).cummin(1).values.flip(1)
    return stop_BT - first_BT


def segments_of(batch: Batch) -> Tensor:
    """Return segment ids [B, T]; all 0 for samples that are not pairs."""
    segments: Tensor | None = batch.segments_BT
    return torch.zeros_like(batch.tokens_BT) if segments is None else segments
