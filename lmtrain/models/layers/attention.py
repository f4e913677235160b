"""Self-attention with one fused query-key-value linear. Called by Block.

Knows no head count: a tensor-parallel rank holds some of the heads, so counts follow from the width that the qkv
linear makes. What does not change with a cut is the head width and how many queries share a key.

The last block may be asked for few positions: queries and MLP are then made for these alone. Keys and values are still
made of all positions, so that the numbers are those of the whole block. Called for that by Stack and Block.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Rotation(NamedTuple):
    """fp32, [T, 1, K/2], or [B, T, 1, K/2] where positions restart within a row: one set for all heads."""

    cos: Tensor
    sin: Tensor


def build_rotation(positions: Tensor, head_width: int, base: float) -> Rotation:
    """Positions are [T], or [B, T]."""
    pairs = torch.arange(0, head_width, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / base ** (pairs / head_width)
    angles = positions.float()[..., None, None] * frequencies
    return Rotation(angles.cos(), angles.sin())


def rotate(x_BTHK: Tensor, rotation: Rotation) -> Tensor:
    """Turn in fp32: at position 100,000 a bf16 angle would be off by whole turns."""
    left, right = x_BTHK.float().chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).type_as(x_BTHK)


class Attention(nn.Module):
    """qkv.weight is stored as [H*K queries | Hkv*K keys | Hkv*K values] rows."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_width: int,
        *,
        bias: bool,
        dropout: float,
        causal: bool,
    ) -> None:
        super().__init__()
        self.head_width = head_width
        self.queries_per_key = num_heads // num_kv_heads
        self.qkv = nn.Linear(width, (num_heads + 2 * num_kv_heads) * head_width, bias=bias)
        self.causal = causal
        self.core = DotProduct(dropout, causal=causal)
        self.out = nn.Linear(num_heads * head_width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x_BTD: Tensor, mask: Tensor | BlockMask | None, rotation: Rotation | None, asked_BQ: Tensor | None = None
    ) -> Tensor:
        """Return [B, T, D], or [B, Q, D] if query positions are given."""
        q_BTHK, k_BTHK, v_BTHK = self._split_heads(self.qkv(x_BTD))
        if rotation is not None:
            q_BTHK, k_BTHK = rotate(q_BTHK, rotation), rotate(k_BTHK, rotation)
        # because: heads stay behind one another in memory, token by token, as the linears before and behind have them:
        # kernels take them so, and none of the three is copied, nor what becomes of them
        q_BHTK, k_BHTK, v_BHTK = (x_BTHK.transpose(1, 2) for x_BTHK in (q_BTHK, k_BTHK, v_BTHK))
        if asked_BQ is not None:
            mask = mask_of_asked(mask, asked_BQ, k_BHTK.shape[2], causal=self.causal)
            q_BHTK = q_BHTK.take_along_dim(asked_BQ[:, None, :, None], dim=2)
        y_BHTK = self.core(q_BHTK, k_BHTK, v_BHTK, mask)
        y: Tensor = self.dropout(self.out(y_BHTK.transpose(1, 2).flatten(2)))
        return y

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, (H + 2 Hkv) K] -> three [B, T, heads, K], all views; the lengths are those of this rank."""
        kv = qkv.shape[-1] // (self.queries_per_key + 2)
        parts = torch.split(qkv, [kv * self.queries_per_key, kv, kv], dim=-1)
        q, k, v = (part.view(*part.shape[:2], -1, self.head_width) for part in parts)
        return q, k, v


class DotProduct(nn.Module):
    """softmax(q k / sqrt(K)) v. A module of its own, so that kernel and random numbers can be swapped."""

    def __init__(self, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.dropout, self.causal = dropout, causal

    def forward(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        if mask is not None and not isinstance(mask, Tensor):
            from lmtrain.models.layers.block_masks import attend  # because: it takes a second to import

            return attend(q_BHTK, k_BHTK, v_BHTK, mask)
        if mask is not None and q_BHTK.shape[1] != k_BHTK.shape[1]:
            # because: no fused CUDA kernel takes a mask and fewer keys than queries; the fallback would hold all scores
            group = q_BHTK.shape[1] // k_BHTK.shape[1]
            k_BHTK, v_BHTK = (x.repeat_interleave(group, dim=1) for x in (k_BHTK, v_BHTK))
        return F.scaled_dot_product_attention(
            q_BHTK, k_BHTK, v_BHTK, mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
            enable_gqa=q_BHTK.shape[1] != k_BHTK.shape[1],
        )


class BuildMask(Protocol):
    """Of all positions, as build_mask here, or of blocks."""

    def __call__(
        self,
        length: int,
        *,
        causal: bool,
        window: int | None,
        documents_BT: Tensor | None,
        real_BT: Tensor | None,
        device: torch.device,
    ) -> Tensor | BlockMask | None: ...


def build_mask(
    length: int,
    *,
    causal: bool,
    window: int | None,
    documents_BT: Tensor | None,
    real_BT: Tensor | None = None,
    device: torch.device,
) -> Tensor | None:
    """Return a mask, True where a token may attend; None if the kernel's causal rule, or no rule, is enough.

    With a window token i attends to i - window + 1 .. i; with documents, within its own; padding is masked. The mask is
    [T, T], [B, 1, T, T] or [B, 1, 1, T].
    """
    masks = []
    if window is not None and window < length:
        back = _back(length, device)
        masks.append(back < window if causal else back.abs() < window)
    if documents_BT is not None:
        masks.append(documents_BT[:, None, :, None] == documents_BT[:, None, None, :])
    if real_BT is not None and not causal:  # rows are padded on the right, where a causal token never looks
        masks.append(real_BT[:, None, None, :])
    if causal and masks:
        masks.insert(0, _back(length, device) >= 0)
    return reduce(torch.logical_and, masks) if masks else None


def _back(length: int, device: torch.device) -> Tensor:
    """[T, T]: how far behind the looking token the seen one lies."""
    at = torch.arange(length, device=device)
    return at[:, None] - at[None, :]


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
    """Return the rows of a mask for the query positions; a mask is [T, T], [B, 1, T, T], [B, 1, 1, T] or of blocks."""
    if mask is None:
        keys_T = torch.arange(length, device=asked_BQ.device)
        return (keys_T <= asked_BQ[:, :, None])[:, None] if causal else None
    if not isinstance(mask, Tensor):
        from lmtrain.models.layers.block_masks import dense  # because: it takes a second to import

        return dense(mask, asked_BQ)
    if mask.ndim == 2:
        return mask[asked_BQ][:, None]
    return mask if mask.shape[2] == 1 else mask.take_along_dim(asked_BQ[:, None, :, None], dim=2)
