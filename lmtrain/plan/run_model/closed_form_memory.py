"""Bytes of the fullest rank by closed form: state kept between steps, memory added by a step, and overhead.

The first stage's rank holds the embedding and the most micro-batches, the last stage's the head and the logits, and
stages between them may have more layers: these three are computed, and the fullest counts. Arrays have an entry per
case.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from lmtrain.plan.price.hardware import Factors
from lmtrain.plan.price.step_time import stage_weights
from lmtrain.plan.price.workload import Attention, Column, Columns, Pointwise, Schedule

GIB = 2.0**30
FIRST, MIDDLE, LAST = range(3)  # stages; MIDDLE is the second stage, which holds most of the middle ones


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank by purpose."""

    weights: Column  # in compute precision
    gradients: Column
    optimizer: Column  # master weights and moments
    activations: Column  # for all micro-batches in flight
    working: Column  # for the block in its backward: recomputed activations and gradients of activations
    logits: Column
    gathered: Column  # gathered blocks of sharded weights, gradient buckets
    communicators: Column  # NCCL, and the device's libraries
    slack: Column  # fragmentation of the allocator

    @property
    def total(self) -> Column:
        total: Column = np.sum([getattr(self, field.name) for field in fields(self)], axis=0)
        return total


def price_memory(c: Columns, f: Factors) -> RankMemory:
    """Return the bytes of the fullest rank for each case."""
    fullest = _stage_memory(c, f, FIRST)
    for position in (MIDDLE, LAST):
        candidate = _stage_memory(c, f, position)
        is_fuller = candidate.total > fullest.total
        fullest = RankMemory(**{
            field.name: np.where(is_fuller, getattr(candidate, field.name), getattr(fullest, field.name))
            for field in fields(RankMemory)
        })  # fmt: skip
    return fullest


def _stage_memory(c: Columns, f: Factors, position: int) -> RankMemory:
    """Return the bytes of a rank of the first, a middle or the last stage; `position` is FIRST, MIDDLE or LAST."""
    block, table = stage_weights(c)
    folded = c.schedule == Schedule.ZB_V  # the first rank has the first and the last stage
    first_tables = np.where(((c.pp == 1) | folded) & ~(c.tied > 0), 2.0, 1.0)
    num_tables = (first_tables, np.zeros(len(c)), np.where(folded, 0.0, 1.0))[position]
    ends = np.where(folded, c.last_stage, c.first_stage), np.where(folded, c.largest_stage, c.last_stage)
    between = np.where(c.pp > 2, c.largest_stage, 0.0)  # no middle stage if pp is 2
    layers = np.where(c.pp == 1, c.num_layers, (ends[0], between, ends[1])[position])
    num_weights = layers * block + num_tables * table
    shard = np.where(c.zero > 0, c.shard, 1.0)
    sharded = c.zero == 3
    all_bytes, kept_bytes, scores = _activation_bytes(c, f)
    in_flight = _micro_batches_in_flight(c, position)
    tokens = c.microbatch * c.seq_len
    half_bytes = _weight_half_bytes(c)
    activations = layers * np.max([kept_bytes * waiting + half_bytes * halves for waiting, halves in in_flight], axis=0)
    backward = np.maximum(all_bytes - kept_bytes, 0.0) + scores + 2 * tokens * c.width + 4 * tokens * c.ffn_width / c.tp
    has_head = (c.pp == 1) | folded if position == FIRST else (position == LAST) & ~folded
    at_once = np.where(folded, 1.0, np.max([waiting + halves for waiting, halves in in_flight], axis=0))
    logits = np.where(has_head, _logits_bytes(c, f, at_once), 0.0)
    gathering = np.where(sharded, 2 * (2 * block + c.reduce_bytes * block) + 2 * table, 0.0)
    largest = np.where(num_tables > 0, np.maximum(block, table), block)
    buffers = np.where(c.group_buffers > 0, _group_buffer_bytes(c, largest, block + num_tables * table), gathering)
    is_single = (c.group_buffers > 0) & (c.num_microbatches == 1)  # gradients are reduced as soon as they are computed
    is_reduced_early = (sharded & (c.each_microbatch > 0)) | ((c.zero == 2) & (c.reduce_each > 0)) | is_single
    transient = activations + np.maximum(backward, logits)
    return RankMemory(
        weights=2 * num_weights / np.where(sharded & (c.regather > 0) & (c.each_microbatch > 0), shard, 1.0),
        gradients=c.sum_bytes * num_weights / np.where(is_reduced_early, shard, 1.0),
        optimizer=c.optimizer_bytes * num_weights / shard,
        activations=activations,
        working=np.where(backward > logits, backward, 0.0), logits=np.where(backward > logits, 0.0, logits),
        gathered=buffers + c.flat_copies * (f["copied_bytes"] * num_weights + 4 * num_weights / shard),
        communicators=np.full(len(c), f["base_GiB"] * GIB),
        slack=f["slack"] * transient + f["unreused"] * np.minimum(backward, logits),
    )  # fmt: skip


def _activation_bytes(c: Columns, f: Factors) -> tuple[Column, Column, Column]:
    """Return bytes per block and micro-batch: all that backward needs, the part kept until then, and the scores.

    The formulas follow Korthikanti 2022.
    """
    tokens = c.microbatch * c.seq_len
    seq_shards = np.where(c.sequence_parallel > 0, c.tp, 1.0)
    heads, keys = c.num_heads * c.head_width / c.tp, c.num_kv_heads * c.head_width / c.tp
    gathered = np.where((c.sequence_parallel > 0) & (c.keeps_gathered > 0), 4 - 4 / seq_shards, 0.0)
    residual_bytes = 8 + 2 * c.dropout + c.eager_norm * 2 * f["norm_kept"]
    residual = f["kept_residual"] * residual_bytes * c.width / seq_shards + gathered * c.width
    attention = 2 * (heads + 2 * keys) + 2 * heads + np.where(c.pointwise == Pointwise.EAGER, 2 * (heads + keys), 0)
    fused = np.where(c.attention == Attention.FUSED, f["fused_kept"], 0.0)  # because: flash kernels never write scores
    scores = np.where(c.attention == Attention.SCORES, f["scores_kept"], fused) * c.num_heads / c.tp * c.seq_len
    lse = np.where(c.attention >= Attention.FLASH1, 4 * c.num_heads / c.tp, 0)
    mlp = np.where(c.gated > 0, 8.0, 4.0) * c.ffn_width / c.tp
    kernel_factor = f.by_index(("kept_eager", "kept_fused", "kept_compiled"), c.pointwise)
    all_bytes = tokens * (residual + kernel_factor * (attention + mlp) + scores + lse)
    checkpoint = tokens * 2 * c.width / seq_shards
    without_scores = all_bytes - tokens * scores * np.minimum(c.recomputed_attention, 1.0)
    is_full = c.recomputed_products >= 1.0
    is_partial = (c.recomputed_products > 0) & ~is_full
    kept = np.where(
        is_full, checkpoint, np.where(is_partial, (1 - c.recomputed_products) * all_bytes + checkpoint, without_scores)
    )
    kept = np.where((c.recomputed_products > 0) & (c.recomputed_attention == 0), 0.45 * all_bytes, kept)
    products = tokens * 2 * (1 / seq_shards + 2) * c.width + tokens * (2 * (2 * heads + 2 * keys) + mlp / 2)
    is_pointwise_only = (c.recomputed_pointwise > 0) & (c.recomputed_products == 0)
    partly_kept = c.recomputed_pointwise * products + (1 - c.recomputed_pointwise) * all_bytes
    return all_bytes, np.where(is_pointwise_only, partly_kept, kept), tokens * scores


def _weight_half_bytes(c: Columns) -> Column:
    """Return bytes per block and micro-batch between the halves of a backward: products' inputs and output gradients.

    Both cover the whole sequence, even if sequence parallelism cuts it outside of the products.
    """
    heads, keys = c.num_heads * c.head_width / c.tp, c.num_kv_heads * c.head_width / c.tp
    block_inputs = np.where((c.parallel_block > 0) & (c.sequence_parallel == 0), 2.0, 4.0) * c.width
    products = 2 * heads + 2 * keys + (2 + c.gated) * c.ffn_width / c.tp
    return c.microbatch * c.seq_len * c.precision * (block_inputs + products)


def _logits_bytes(c: Columns, f: Factors, num_held: Column) -> Column:
    """Return bytes of the loss of one micro-batch, plus the logits of `num_held` - 1 other micro-batches."""
    num_logits = c.microbatch * c.seq_len * c.scored_share * c.vocab
    split = np.where(c.whole_logits > 0, 1.0, c.tp)
    gathered_pieces = np.where(
        (c.whole_logits > 0) & (c.tp > 1), 2 + 2 / c.tp, 0.0
    )  # gathered pieces before they are joined
    at_once_bytes = num_logits * (
        f.by_index(("logit_eager", "logit_fused", "logit_compiled"), c.pointwise) / split + gathered_pieces
    )
    working = c.loss_bytes * np.minimum(num_logits / split, c.loss_numbers)
    in_pieces = (2 - c.over_logits) * c.precision * num_logits / split + working
    return np.where(c.loss_numbers > 0, in_pieces, at_once_bytes) + (num_held - 1) * c.precision * num_logits / split


def _group_buffer_bytes(c: Columns, largest_group: Column, gathered_weights: Column) -> Column:
    """Return bytes of FSDP's buffers for weight groups that are gathered and reduced in turn, sharded or not.

    `largest_group` and `gathered_weights` are numbers of weights.
    """
    shard = np.where(c.zero > 0, c.shard, 1.0)
    buffers = largest_group * (np.where(shard > 1, c.precision, 0.0) + c.reduce_bytes * (1 + 1 / shard))
    return np.where(c.dp > 1, buffers + np.where(c.zero == 3, c.precision * gathered_weights, 0.0), 0.0)


def _micro_batches_in_flight(c: Columns, position: int) -> list[tuple[Column, Column]]:
    """Return micro-batches held at once, as pairs: those awaiting their backward, those between its halves.

    There are several pairs if the two counts peak at different times.
    """
    num_microbatches, pp, vp, index = c.num_microbatches, c.pp, c.vp, float(position)
    if position == LAST:
        usual, double = np.ones(len(c)), pp
    else:  # each further stage holds one micro-batch fewer, or two chunks fewer if vp > 1
        group = np.ceil(
            num_microbatches / np.maximum(num_microbatches // pp, 1)
        )  # micro-batches that pass a chunk in a row
        usual = np.where(vp > 1, (2 * (pp - 1 - index) + (vp - 1) * group + 1) / vp, pp - index)
        double = 2 * (pp - index) - 1
    is_zb_1, is_zb_v = c.schedule == Schedule.ZB_1, c.schedule == Schedule.ZB_V
    waiting = np.select(
        [c.schedule == Schedule.ZB_2, is_zb_v, c.schedule == Schedule.GPIPE], [double, pp, num_microbatches], usual
    )
    pairs = [(waiting, np.zeros(len(c)))]
    deferred_counts: list[Column] = [[], [np.ones(len(c)), pp - 2], [pp - 1]][
        position
    ]  # deferred halves of the place's ranks
    for deferred in deferred_counts:
        pairs += [
            (np.where(is_zb_1, pp - deferred, 0.0), np.where(is_zb_1, deferred, np.where(is_zb_v, pp - 0.5, 0.0))),
            (np.where(is_zb_1, pp - deferred - 1, 0.0), np.where(is_zb_1, deferred + 1, 0.0)),
        ]
    return [
        (
            np.minimum(waiting, num_microbatches - np.minimum(halves, num_microbatches)),
            np.minimum(halves, num_microbatches),
        )
        for waiting, halves in pairs
    ]
