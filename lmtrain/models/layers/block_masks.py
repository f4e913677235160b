"""Block masks for flex_attention: which 128 x 128 blocks of (query, key) pairs a GPU kernel skips, masks or runs whole.

The block form of attention.build_mask: a table of blocks (no pair allowed, some allowed, all allowed), computed from
the limits of each block, so that no full mask matrix is created. Built by Stack if parallel has selected it; used by
DotProduct and by mask_of_asked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # because: flex_attention's kernels are written for this size, which is its default

Allowed = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (sample, head, query position, key position) -> allowed


def build_block_mask(
    length: int,
    *,
    causal: bool,
    window: int | None,
    documents_BT: Tensor | None,
    real_BT: Tensor | None = None,
    device: torch.device,
) -> BlockMask | None:
    """Build the block form of `build_mask`'s mask; None if `build_mask` returns None. Documents must be contiguous.

    With scattered documents more blocks than necessary would be masked pair by pair, with the same result.
    """
    window = None if window is None or window >= length else window
    real_BT = None if causal else real_BT
    if window is None and documents_BT is None and real_BT is None:
        return None
    least, most = (0 if causal else 1 - (window or length)), (window or length) - 1
    first_N = torch.arange(0, length, BLOCK, device=device)
    some, every = _by_distance(first_N, length, least, most)
    for more_some, more_every in _by_row(length, documents_BT, real_BT):
        some, every = some & more_some, every & more_every
    # because: a kernel runs a full block without bounds checks, so a block cut short by the sequence end is never full
    whole_N = first_N + BLOCK <= length
    every = every & whole_N[:, None] & whole_N
    blocks, full = _listed(some & ~every), _listed(every)
    allowed = _allowed(least, most, documents_BT, real_BT)
    return BlockMask.from_kv_blocks(*blocks, *full, BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=(length, length))


def attend(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: BlockMask) -> Tensor:
    """Return softmax(q k / sqrt(K)) v under the mask; several query heads may share a key head."""
    # because: uncompiled, flex_attention creates the full score matrix; a compiled block traces it into its own graph
    alone = q_BHTK.is_cuda and not torch.compiler.is_compiling()
    flex = _compiled() if alone else flex_attention
    y: Tensor = flex(q_BHTK, k_BHTK, v_BHTK, block_mask=mask, enable_gqa=q_BHTK.shape[1] != k_BHTK.shape[1])
    return y


@cache
def _compiled() -> Any:
    """Return the compiled flex_attention, shared by all blocks that are not compiled themselves."""
    return torch.compile(flex_attention, dynamic=False)


def dense(mask: BlockMask, looking_BQ: Tensor) -> Tensor:
    """Return [B, 1, Q, T]: the dense mask rows of these query positions, evaluated pair by pair."""
    device, (samples, _, _, length) = looking_BQ.device, mask.shape
    at_B = torch.arange(samples, device=device)[:, None, None, None]
    keys_T = torch.arange(length, device=device)
    found: Tensor = mask.mask_mod(at_B, torch.zeros_like(at_B), looking_BQ[:, None, :, None], keys_T)
    return found


def _allowed(least: int, most: int, documents_BT: Tensor | None, real_BT: Tensor | None) -> Allowed:
    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        back = q - k
        answers = [back >= least, back <= most]
        if documents_BT is not None:
            answers.append(documents_BT[b, q] == documents_BT[b, k])
        if real_BT is not None:
            answers.append(real_BT[b, k])
        return reduce(torch.logical_and, answers)

    return allowed


def _by_distance(first_N: Tensor, length: int, least: int, most: int) -> tuple[Tensor, Tensor]:
    """Return two [N, N] tables: whether any pair, and whether every pair, of two blocks is `least` to `most` apart.

    The distance of a pair is the query position minus the key position.
    """
    last_N = (first_N + BLOCK).clamp(max=length) - 1
    nearest, furthest = first_N[:, None] - last_N, last_N[:, None] - first_N
    return (furthest >= least) & (nearest <= most), (nearest >= least) & (furthest <= most)


def _by_row(length: int, documents_BT: Tensor | None, real_BT: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Return the same two tables, [B, N, N] or [B, 1, N], for the conditions of documents and of padding."""
    found = []
    if documents_BT is not None:
        low_BN, high_BN = _ends(documents_BT)
        meet = (low_BN[:, :, None] <= high_BN[:, None]) & (low_BN[:, None] <= high_BN[:, :, None])
        one = (low_BN == high_BN)[:, :, None] & (low_BN == high_BN)[:, None]
        found.append((meet, meet & one))
    if real_BT is not None:
        low_BN, high_BN = _ends(real_BT.to(torch.int32))
        found.append((high_BN[:, None] > 0, low_BN[:, None] > 0))
    return found


def _ends(values_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, N]: the minimum and maximum of each block; the last block is padded with the row's last value."""
    missing = -values_BT.shape[1] % BLOCK
    padded = torch.cat([values_BT, values_BT[:, -1:].expand(-1, missing)], dim=1)
    low_BN, high_BN = padded.view(len(padded), -1, BLOCK).aminmax(dim=2)
    return low_BN, high_BN


def _listed(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's number of True entries [B, 1, N] and the column order, True first, [B, 1, N, N].

    `table` is [N, N] or [B, N, N].
    """
    table_B1NN = table.view(-1, 1, *table.shape[-2:]).to(torch.int32)
    order = table_B1NN.argsort(dim=-1, descending=True, stable=True)
    return table_B1NN.sum(-1, dtype=torch.int32), order.to(torch.int32)
