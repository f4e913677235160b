"""Block masks for flex_attention: which 128 x 128 blocks of (query, key) pairs a GPU kernel skips, masks or runs whole.

The block form of attention.build_mask: a table of blocks (no pair allowed, some allowed, all allowed), computed from
the limits of each block, so that no full mask matrix is created. Built by Stack if parallel has selected it; used by
DotProduct and by attention.mask_rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # because: flex_attention's kernels are written for this size, which is its default

PairRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (sample, head, query position, key position) -> allowed


def build_block_mask(
    length: int,
    *,
    causal: bool,
    window: int | None,
    documents_BT: Tensor | None,
    not_padding_BT: Tensor | None = None,
    device: torch.device,
    always: bool = False,
) -> BlockMask | None:
    """Return a BlockMask of flex_attention that allows the same (query, key) pairs as `build_mask` with these
    arguments. Return None where `build_mask` does, unless `always`, which attention with capped scores needs. Each
    document should be contiguous.

    With scattered documents more blocks than necessary would be masked pair by pair, with the same result.
    """
    window = None if window is None or window >= length else window
    not_padding_BT = None if causal else not_padding_BT
    if window is None and documents_BT is None and not_padding_BT is None and not always:
        return None
    min_distance, max_distance = (0 if causal else 1 - (window or length)), (window or length) - 1
    first_N = torch.arange(0, length, BLOCK, device=device)
    any_allowed, all_allowed = _blocks_by_distance(first_N, length, min_distance, max_distance)
    for row_any, row_all in _blocks_by_content(documents_BT, not_padding_BT):
        any_allowed, all_allowed = any_allowed & row_any, all_allowed & row_all
    # because: a kernel runs a full block without bounds checks, so a block cut short by the sequence end is never full
    whole_N = first_N + BLOCK <= length
    all_allowed = all_allowed & whole_N[:, None] & whole_N
    blocks, full = _block_lists(any_allowed & ~all_allowed), _block_lists(all_allowed)
    allowed = _pair_rule(min_distance, max_distance, documents_BT, not_padding_BT)
    return BlockMask.from_kv_blocks(*blocks, *full, BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=(length, length))


def attend_with_block_mask(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    mask: BlockMask,
    scale: float | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return softmax(q k x scale) v [B, H, T, K], computed by flex_attention for the pairs that `mask` allows. `scale`
    is 1 / sqrt(K) by default. With a `cap` the scores s become cap x tanh(s / cap) before the softmax. Several query
    heads may share a key head.
    """
    # because: uncompiled, flex_attention creates the full score matrix; a compiled block traces it into its own graph
    traced = torch.compiler.is_compiling()
    flex = _compiled() if q_BHTK.is_cuda and not traced else flex_attention
    # because: the compiled flex_attention would be compiled again for another function, and a trace ignores the cache
    build_score_mod = _cap_scores if traced else _cached_cap_scores
    score_mod = None if cap is None else build_score_mod(cap)
    y: Tensor = flex(q_BHTK, k_BHTK, v_BHTK, score_mod, mask, scale, q_BHTK.shape[1] != k_BHTK.shape[1])
    return y


def _cap_scores(cap: float) -> Callable[..., Tensor]:
    """Return a score_mod for flex_attention: a function that takes a score and its place, and returns cap x tanh(score
    / cap).
    """

    def capped(score: Tensor, *place: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


_cached_cap_scores = cache(_cap_scores)


@cache
def _compiled() -> Any:
    """Return the compiled flex_attention, shared by all blocks that are not compiled themselves."""
    return torch.compile(flex_attention, dynamic=False)


def dense_mask_rows(mask: BlockMask, query_positions_BQ: Tensor) -> Tensor:
    """Return a boolean mask [B, 1, Q, T], True where `mask` lets the query at an index in `query_positions_BQ` attend
    to a key. Every pair is evaluated.
    """
    device, (samples, _, _, length) = query_positions_BQ.device, mask.shape
    at_B = torch.arange(samples, device=device)[:, None, None, None]
    keys_T = torch.arange(length, device=device)
    rows_B1QT: Tensor = mask.mask_mod(at_B, torch.zeros_like(at_B), query_positions_BQ[:, None, :, None], keys_T)
    return rows_B1QT


def _pair_rule(
    min_distance: int, max_distance: int, documents_BT: Tensor | None, not_padding_BT: Tensor | None
) -> PairRule:
    """Return a mask_mod for flex_attention: a function of (sample, head, query position, key position) that is True if
    query minus key position is in [min_distance, max_distance], both have the same document id, and the key is no
    padding. The last two conditions are left out if their tensors are None.
    """
    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = q - k
        conditions = [distance >= min_distance, distance <= max_distance]
        if documents_BT is not None:
            conditions.append(documents_BT[b, q] == documents_BT[b, k])
        if not_padding_BT is not None:
            conditions.append(not_padding_BT[b, k])
        return reduce(torch.logical_and, conditions)

    return allowed


def _blocks_by_distance(first_N: Tensor, length: int, min_distance: int, max_distance: int) -> tuple[Tensor, Tensor]:
    """Return two boolean tables [N, N], query blocks x key blocks: whether some pair of positions in the two blocks,
    and whether every pair, has a distance (query minus key position) in [min_distance, max_distance]. `first_N` has
    each block's first position; `length` is the sequence's.
    """
    last_N = (first_N + BLOCK).clamp(max=length) - 1
    nearest, furthest = first_N[:, None] - last_N, last_N[:, None] - first_N
    any_NN = (furthest >= min_distance) & (nearest <= max_distance)
    return any_NN, (nearest >= min_distance) & (furthest <= max_distance)


def _blocks_by_content(
    documents_BT: Tensor | None, not_padding_BT: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Return a list of pairs of boolean tables, query blocks x key blocks: a pair for document ids and then one for
    padding, each if given. The first table says whether some query of a block may attend to some key of another, the
    second whether all may. Tables are [B, N, N] for documents and [B, 1, N] for padding.

    A query may attend to keys of its own document, and to keys that are no padding.
    """
    tables = []
    if documents_BT is not None:
        low_BN, high_BN = _block_ranges(documents_BT)
        overlap = (low_BN[:, :, None] <= high_BN[:, None]) & (low_BN[:, None] <= high_BN[:, :, None])
        same = (low_BN == high_BN)[:, :, None] & (low_BN == high_BN)[:, None]
        tables.append((overlap, overlap & same))
    if not_padding_BT is not None:
        low_BN, high_BN = _block_ranges(not_padding_BT.to(torch.int32))
        tables.append((high_BN[:, None] > 0, low_BN[:, None] > 0))
    return tables


def _block_ranges(values_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors [B, N], the minimum and the maximum of the values in each block of BLOCK positions. The last
    block is padded with the row's last value.
    """
    missing = -values_BT.shape[1] % BLOCK
    padded = torch.cat([values_BT, values_BT[:, -1:].expand(-1, missing)], dim=1)
    low_BN, high_BN = padded.view(len(padded), -1, BLOCK).aminmax(dim=2)
    return low_BN, high_BN


def _block_lists(table: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a boolean table, query blocks x key blocks, into the form that flex_attention takes: the number of True
    entries in each row, [B, 1, N], and each row's column numbers, those of True entries first, [B, 1, N, N].

    `table` is [N, N] or [B, N, N].
    """
    table_B1NN = table.view(-1, 1, *table.shape[-2:]).to(torch.int32)
    order = table_B1NN.argsort(dim=-1, descending=True, stable=True)
    return table_B1NN.sum(-1, dtype=torch.int32), order.to(torch.int32)
