"""Self-attention with a fused query-key-value linear. Called by Block.

Stores no head count: a tensor-parallel rank holds a part of the heads, so counts follow from the output width of the
qkv linear. The head width and the number of queries per key do not change with sharding.

The last block may be limited to a few positions: queries and MLP are then computed only for these. Keys and values are
still computed for all positions, so that the results equal those of the whole block. Used by Stack and Block.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.models.layers.rotary import Rotation, rotate

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Attention(nn.Module):
    """Self-attention. The rows of qkv.weight are stored as [H*K queries | Hkv*K keys | Hkv*K values]. `q_norm` and
    `k_norm`, if given, normalize queries and keys before they are turned.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_width: int,
        *,
        qkv_bias: bool,
        out_bias: bool,
        core: DotProduct,
        dropout: float,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.head_width = head_width
        self.queries_per_key = num_heads // num_kv_heads
        self.qkv = nn.Linear(width, (num_heads + 2 * num_kv_heads) * head_width, bias=qkv_bias)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.causal = core.causal
        self.core = core
        self.out = nn.Linear(num_heads * head_width, width, bias=out_bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x_BTD: Tensor,
        mask: Tensor | BlockMask | None,
        rotation: Rotation | None,
        query_positions_BQ: Tensor | None = None,
    ) -> Tensor:
        """Return the output of self-attention: [B, T, D], or [B, Q, D] for only the positions with the indices
        `query_positions_BQ`. `mask` is from `build_mask` or `build_block_mask`; None stands for the kernel's own causal
        rule, or for none. `rotation` has the rotary angles of all T positions; None if the layer has none.
        """
        q_BTHK, k_BTHK, v_BTHK = self._split_heads(self.qkv(x_BTD))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHK, k_BTHK = self.q_norm(q_BTHK), self.k_norm(k_BTHK)
        if rotation is not None:
            q_BTHK, k_BTHK = rotate(q_BTHK, rotation), rotate(k_BTHK, rotation)
        # because: the memory order stays token by token, head after head, as the linears before and after use it; the
        # attention kernels accept this order, so that neither their inputs nor their output are copied
        q_BHTK, k_BHTK, v_BHTK = (x_BTHK.transpose(1, 2) for x_BTHK in (q_BTHK, k_BTHK, v_BTHK))
        if query_positions_BQ is not None:
            mask = mask_rows(mask, query_positions_BQ, k_BHTK.shape[2], causal=self.causal)
            q_BHTK = q_BHTK.take_along_dim(query_positions_BQ[:, None, :, None], dim=2)
        y_BHTK = self.core(q_BHTK, k_BHTK, v_BHTK, mask)
        y: Tensor = self.dropout(self.out(y_BHTK.transpose(1, 2).flatten(2)))
        return y

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split fused projections [B, T, (H + 2 Hkv) K] into queries, keys and values [B, T, heads, K], without a copy.
        The numbers of heads are those of this tensor-parallel rank.
        """
        kv = qkv.shape[-1] // (self.queries_per_key + 2)
        parts = torch.split(qkv, [kv * self.queries_per_key, kv, kv], dim=-1)
        q, k, v = (part.view(*part.shape[:2], -1, self.head_width) for part in parts)
        return q, k, v


class DotProduct(nn.Module):
    """softmax(q k x scale) v as a separate module, so that the kernel and the random numbers can be replaced. `scale`
    is 1 / sqrt(K) by default. With a `cap` the scores s = q k x scale become cap x tanh(s / cap) before the softmax.
    """

    def __init__(
        self, dropout: float, *, causal: bool, scale: float | None = None, cap: float | None = None
    ) -> None:
        super().__init__()
        self.dropout, self.causal = dropout, causal
        self.scale, self.cap = scale, cap

    def forward(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        if mask is not None and not isinstance(mask, Tensor):
            # because: this import takes a second
            from lmtrain.models.layers.flex_attention_block_masks import attend_with_block_mask

            return attend_with_block_mask(q_BHTK, k_BHTK, v_BHTK, mask, self.scale, self.cap)
        if (mask is not None or self.cap is not None) and q_BHTK.shape[1] != k_BHTK.shape[1]:
            # because: no fused CUDA kernel takes a mask with grouped queries; the fallback would hold all scores
            group = q_BHTK.shape[1] // k_BHTK.shape[1]
            k_BHTK, v_BHTK = (x.repeat_interleave(group, dim=1) for x in (k_BHTK, v_BHTK))
        if self.cap is not None:
            return self._attend_with_cap(q_BHTK, k_BHTK, v_BHTK, mask, self.cap)
        return F.scaled_dot_product_attention(
            q_BHTK, k_BHTK, v_BHTK, mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
            scale=self.scale,
            enable_gqa=q_BHTK.shape[1] != k_BHTK.shape[1],
        )

    def _attend_with_cap(
        self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: Tensor | None, cap: float
    ) -> Tensor:
        """Return attention's output [B, H, T, K] with capped scores, in torch operations that hold all scores in
        memory, since no fused kernel caps scores under a dense mask. Keys and values have as many heads as queries.
        """
        scale = q_BHTK.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores_BHTT = cap * torch.tanh(q_BHTK @ k_BHTK.transpose(-1, -2) * (scale / cap))
        if mask is None and self.causal:
            mask = _query_minus_key(k_BHTK.shape[2], q_BHTK.device) >= 0
        if mask is not None:
            scores_BHTT = scores_BHTT.masked_fill(~mask, float("-inf"))
        exact = torch.promote_types(scores_BHTT.dtype, torch.float32)
        shares_BHTT = scores_BHTT.softmax(-1, dtype=exact).type_as(q_BHTK)
        return F.dropout(shares_BHTT, self.dropout, self.training) @ v_BHTK


class BuildMask(Protocol):
    """A function that builds a dense mask (`build_mask`) or a block mask (`build_block_mask`)."""

    def __call__(
        self,
        length: int,
        *,
        causal: bool,
        window: int | None,
        documents_BT: Tensor | None,
        not_padding_BT: Tensor | None,
        device: torch.device,
        always: bool,
    ) -> Tensor | BlockMask | None: ...


def build_mask(
    length: int,
    *,
    causal: bool,
    window: int | None,
    documents_BT: Tensor | None,
    not_padding_BT: Tensor | None = None,
    device: torch.device,
    always: bool = False,
) -> Tensor | None:
    """Return a boolean attention mask for sequences of `length` tokens, True where a query may attend to a key, which
    broadcasts to [B, heads, T, T]. With a window of w tokens, position i attends to i - w + 1 .. i; with documents only
    to its own document; never to padding. Return None if no mask is needed besides the attention kernel's own causal
    rule. `always` is there for `build_block_mask` and changes nothing here.
    """
    masks = []
    if window is not None and window < length:
        distance_TT = _query_minus_key(length, device)
        masks.append(distance_TT < window if causal else distance_TT.abs() < window)
    if documents_BT is not None:
        masks.append(documents_BT[:, None, :, None] == documents_BT[:, None, None, :])
    if not_padding_BT is not None and not causal:  # rows are padded on the right, which causal tokens never attend to
        masks.append(not_padding_BT[:, None, None, :])
    if causal and masks:
        masks.insert(0, _query_minus_key(length, device) >= 0)
    return reduce(torch.logical_and, masks) if masks else None


def _query_minus_key(length: int, device: torch.device) -> Tensor:
    """Return [T, T]: the query position minus the key position."""
    position = torch.arange(length, device=device)
    return position[:, None] - position[None, :]


def select_query_positions(is_query_BT: Tensor) -> Tensor | None:
    """Return [B, Q], the indices of the True positions of each row in order. Q is the largest number of them in a row;
    rows with fewer are filled up with other positions. Return None if a row has more than half of its positions True,
    since computing all of them is then faster. Synchronizes with the device.
    """
    num_positions = int(is_query_BT.sum(1).max())  # sync: reads the count, once per batch
    if 2 * num_positions > is_query_BT.shape[1]:
        return None
    return is_query_BT.byte().argsort(dim=1, descending=True, stable=True)[:, : max(num_positions, 1)]


def select_positions(x_BTD: Tensor, query_positions_BQ: Tensor) -> Tensor:
    """Return [B, Q, D]: the hidden states at each row's query positions."""
    return x_BTD.take_along_dim(query_positions_BQ[:, :, None], dim=1)


def scatter_to_sequence(x_BQD: Tensor, query_positions_BQ: Tensor, length: int) -> Tensor:
    """Return [B, T, D], where T is `length`: `x_BQD` at the indices `query_positions_BQ` of each row, and zeros
    elsewhere. If Q equals T, return `x_BQD` itself: nothing is reordered.
    """
    rows, num_positions, width = x_BQD.shape
    if num_positions == length:
        return x_BQD
    x_BTD = x_BQD.new_zeros(rows, length, width)
    return x_BTD.scatter_(1, query_positions_BQ[:, :, None].expand(-1, -1, width), x_BQD)


def mask_rows(
    mask: Tensor | BlockMask | None, query_positions_BQ: Tensor, length: int, *, causal: bool
) -> Tensor | None:
    """Return the rows of an attention mask that belong to the queries at the indices `query_positions_BQ`,
    broadcastable to [B, 1, Q, T], True where a query may attend to a key. Return None if every query may attend to all
    keys. T is `length`.

    `mask` is [T, T], [B, 1, T, T], [B, 1, 1, T], a block mask, or None, which stands for a kernel's own causal rule if
    `causal`.
    """
    if mask is None:
        keys_T = torch.arange(length, device=query_positions_BQ.device)
        return (keys_T <= query_positions_BQ[:, :, None])[:, None] if causal else None
    if not isinstance(mask, Tensor):
        # because: this import takes a second
        from lmtrain.models.layers.flex_attention_block_masks import dense_mask_rows

        return dense_mask_rows(mask, query_positions_BQ)
    if mask.ndim == 2:
        return mask[query_positions_BQ][:, None]
    return mask if mask.shape[2] == 1 else mask.take_along_dim(query_positions_BQ[:, None, :, None], dim=2)
