"""The last block where few positions are asked for: queries and MLP for these alone. Called by Stack and Block.

Keys and values are still made of all positions, so that the numbers are those of the whole block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def asked_positions(asked_BT: Tensor) -> Tensor | None:
    """[B, Q], each row's asked positions in order, and others behind them where a row asks for fewer than another.

    None where a row asks for more than half: a kernel that knows the causal rule by itself is then the faster one.
    """
    most = int(asked_BT.sum(1).max())  # sync: how many, once a batch
    if 2 * most > asked_BT.shape[1]:
        return None
    return asked_BT.byte().argsort(dim=1, descending=True, stable=True)[:, : max(most, 1)]


def at(x_BTD: Tensor, asked_BQ: Tensor) -> Tensor:
    return x_BTD.take_along_dim(asked_BQ[:, :, None], dim=1)


def put_back(x_BQD: Tensor, asked_BQ: Tensor, length: int) -> Tensor:
    """[B, T, D] with zeros where nothing was asked for; as it is where a block of another kind has done all."""
    rows, num, width = x_BQD.shape
    if num == length:
        return x_BQD
    whole = x_BQD.new_zeros(rows, length, width)
    return whole.scatter_(1, asked_BQ[:, :, None].expand(-1, -1, width), x_BQD)


def mask_of_asked(
    mask: Tensor | BlockMask | None, asked_BQ: Tensor, length: int, *, causal: bool
) -> Tensor | None:
    """The rows of a mask, [T, T], [B, 1, T, T] or [B, 1, 1, T], or of blocks, that the asked positions look along."""
    if mask is None:
        keys_T = torch.arange(length, device=asked_BQ.device)
        return (keys_T <= asked_BQ[:, :, None])[:, None] if causal else None
    if not isinstance(mask, Tensor):
        from lmtrain.models.layers.block_masks import dense  # because: it takes a second to import

        return dense(mask, asked_BQ)
    if mask.ndim == 2:
        return mask[asked_BQ][:, None]
    return mask if mask.shape[2] == 1 else mask.take_along_dim(asked_BQ[:, None, :, None], dim=2)
