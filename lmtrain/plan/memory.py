"""Bytes of the fullest rank, by name: what is kept between steps, what a step adds, and what the machine takes.

The rank of the first stage holds the embedding and the most microbatches, that of the last the head and the logits, and
stages between may have more layers: three are worked out, and the fullest counts. Arrays have one entry a case.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from lmtrain.plan.case import Attention, Column, Columns, Pointwise, Schedule
from lmtrain.plan.factors import Factors

GIB = 2.0**30


@dataclass(frozen=True)
class RankMemory:
    weights: Column  # that compute
    gradients: Column
    optimizer: Column  # masters and moments
    activations: Column  # of all microbatches in flight
    working: Column  # of the block at work: what recompute brings back, gradients of activations
    logits: Column
    gathered: Column  # blocks of sharded weights, buckets of gradients
    communicators: Column  # of the device's libraries too
    slack: Column  # of the allocator

    @property
    def total(self) -> Column:
        parts = [getattr(self, field.name) for field in fields(self)]
        found: Column = np.sum(parts, axis=0)
        return found


def price_memory(c: Columns, f: Factors) -> RankMemory:
    fullest = _rank(c, f, FIRST)
    for place in (SECOND, LAST):
        other = _rank(c, f, place)
        fuller = other.total > fullest.total
        chosen = {
            field.name: np.where(fuller, getattr(other, field.name), getattr(fullest, field.name))
            for field in fields(RankMemory)
        }
        fullest = RankMemory(**chosen)
    return fullest


FIRST, SECOND, LAST = range(3)  # stages; the second stands for all between, of which it holds most microbatches


def _rank(c: Columns, f: Factors, place: int) -> RankMemory:
    heads, keys = c.num_heads * c.head_width, c.num_kv_heads * c.head_width
    block = (c.width * (2 * heads + 2 * keys) + c.width * c.ffn_width * (2 + c.gated)) / c.tp
    table = c.vocab * c.width / c.tp
    alone = (c.pp == 1) | (c.schedule == Schedule.ZB_V)  # one rank has both ends
    tables = np.where(alone, np.where(c.tied > 0, 1.0, 2.0), 0.0 if place == SECOND else 1.0)
    stage = np.where(c.pp > 2, c.largest_stage, 0.0)  # there is no second where there are two
    layers = np.where(c.pp == 1, c.num_layers, (c.first_stage, stage, c.last_stage)[place])
    held = layers * block + tables * table
    shard = np.where(c.zero > 0, c.shard, 1.0)
    sharded = c.zero == 3
    one, kept, scores = _activations(c, f)
    flying = _in_flight(c, place)
    tokens = c.microbatch * c.seq_len
    activations = layers * kept * flying
    backward = np.maximum(one - kept, 0.0) + scores + 2 * tokens * c.width + 4 * tokens * c.ffn_width / c.tp
    has_head = alone | (place == LAST)
    logit_bytes = f.by_kind(("logit_eager", "logit_fused", "logit_compiled"), c.pointwise)
    split = np.where(c.whole_logits > 0, 1.0, c.tp)
    pieces = np.where(
        (c.whole_logits > 0) & (c.tp > 1), 2 + 2 / c.tp, 0.0
    )  # gathered, not yet one
    logits = np.where(has_head, tokens * c.vocab * (logit_bytes / split + pieces), 0.0)
    gathering = np.where(sharded, 2 * (2 * block + c.reduce_bytes * block) + 2 * table, 0.0)
    buffers = gathering + c.flat_copies * (f["copied_bytes"] * held + 4 * held / shard)
    lasting = (
        2 * held / np.where(sharded & (c.regather > 0) & (c.each_microbatch > 0), shard, 1.0),
        c.sum_bytes * held / np.where(sharded & (c.each_microbatch > 0), shard, 1.0),
        c.optimizer_bytes * held / shard,
    )
    moving = activations + np.maximum(backward, logits)
    idle = f["unreused"] * np.minimum(backward, logits)
    return RankMemory(
        weights=lasting[0], gradients=lasting[1], optimizer=lasting[2], activations=activations,
        working=np.where(backward > logits, backward, 0.0), logits=np.where(backward > logits, 0.0, logits),
        gathered=buffers, communicators=np.full(len(c), f["base_GiB"] * GIB), slack=f["slack"] * moving + idle,
    )  # fmt: skip


def _activations(c: Columns, f: Factors) -> tuple[Column, Column, Column]:
    """Of a block and microbatch: all its backward needs, what is kept until then, its scores (Korthikanti 2022)."""
    tokens = c.microbatch * c.seq_len
    along = np.where(c.sequence_parallel > 0, c.tp, 1.0)
    heads, keys = c.num_heads * c.head_width / c.tp, c.num_kv_heads * c.head_width / c.tp
    gathered = np.where((c.sequence_parallel > 0) & (c.keeps_gathered > 0), 4 - 4 / along, 0.0)
    norms = c.eager_norm * 2 * f["norm_kept"]
    residual = f["kept_residual"] * (8 + 2 * c.dropout + norms) * c.width / along + gathered * c.width
    attention = 2 * (heads + 2 * keys) + 2 * heads + np.where(c.pointwise == Pointwise.EAGER, 2 * (heads + keys), 0)
    fused = np.where(c.attention == Attention.FUSED, f["fused_kept"], 0.0)  # flash kernels never write scores
    scores_kept = np.where(c.attention == Attention.SCORES, f["scores_kept"], fused)
    scores = scores_kept * c.num_heads / c.tp * c.seq_len
    lse = np.where(c.attention >= Attention.FLASH1, 4 * c.num_heads / c.tp, 0)
    mlp = np.where(c.gated > 0, 8.0, 4.0) * c.ffn_width / c.tp
    many = f.by_kind(("kept_eager", "kept_fused", "kept_compiled"), c.pointwise)
    whole = tokens * (residual + many * (attention + mlp) + scores + lse)
    checkpoint = tokens * 2 * c.width / along
    without_scores = whole - tokens * scores * np.minimum(c.again_attention, 1.0)
    full = c.again_products >= 1.0
    partly = (c.again_products > 0) & ~full
    kept = np.where(full, checkpoint, np.where(partly, (1 - c.again_products) * whole + checkpoint, without_scores))
    kept = np.where((c.again_products > 0) & (c.again_attention == 0), 0.45 * whole, kept)
    return whole, kept, tokens * scores


def _in_flight(c: Columns, place: int) -> Column:
    """Microbatches whose activations a stage holds at once, in units of its layers."""
    num, pp = c.num_microbatches, c.pp
    if place == LAST:
        plain = np.ones(len(c))
        return np.where(c.schedule == Schedule.ZB_2, np.minimum(pp, num), plain)
    later = float(place)  # a stage further holds one less, and its chunks two less
    interleaved = np.minimum(pp * (1 + (pp - 1) / (pp * c.vp)) - 2 * later / c.vp, num)
    one = np.where(c.vp > 1, interleaved, np.minimum(pp - later, num))
    most = np.where(c.schedule == Schedule.ZB_2, np.minimum(2 * (pp - later) - 1, num), one)
    return np.where(c.schedule == Schedule.ZB_V, np.minimum(pp, num), most)
