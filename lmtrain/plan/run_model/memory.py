"""Bytes of the fullest rank by closed form: state kept between steps, memory added by a step, and overhead.

The first stage's rank holds the embedding and the most micro-batches, the last stage's the head and the logits, and
stages between them may have more layers: these three are computed, and the fullest counts. Arrays have an entry per
case.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from lmtrain.plan.price.hardware import Factors
from lmtrain.plan.price.step import stage_weights
from lmtrain.plan.price.workload import Attention, Column, Columns, Pointwise, Schedule

GIB = 2.0**30
FIRST, SECOND, LAST = range(3)  # stages; the second stands for all middle stages, of which it holds most


@dataclass(frozen=True)
class RankMemory:
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
        found: Column = np.sum([getattr(self, field.name) for field in fields(self)], axis=0)
        return found


def price_memory(c: Columns, f: Factors) -> RankMemory:
    fullest = _rank(c, f, FIRST)
    for place in (SECOND, LAST):
        other = _rank(c, f, place)
        fuller = other.total > fullest.total
        fullest = RankMemory(**{
            field.name: np.where(fuller, getattr(other, field.name), getattr(fullest, field.name))
            for field in fields(RankMemory)
        })  # fmt: skip
    return fullest


def _rank(c: Columns, f: Factors, place: int) -> RankMemory:
    block, table = stage_weights(c)
    folded = c.schedule == Schedule.ZB_V  # the first rank has the first and the last stage
    of_first = np.where(((c.pp == 1) | folded) & ~(c.tied > 0), 2.0, 1.0)
    tables = (of_first, np.zeros(len(c)), np.where(folded, 0.0, 1.0))[place]
    ends = np.where(folded, c.last_stage, c.first_stage), np.where(folded, c.largest_stage, c.last_stage)
    between = np.where(c.pp > 2, c.largest_stage, 0.0)  # no middle stage if pp is 2
    layers = np.where(c.pp == 1, c.num_layers, (ends[0], between, ends[1])[place])
    held = layers * block + tables * table
    shard = np.where(c.zero > 0, c.shard, 1.0)
    sharded = c.zero == 3
    one, kept, scores = _activations(c, f)
    flying = _in_flight(c, place)
    tokens = c.microbatch * c.seq_len
    halved = _kept_for_weights(c)
    activations = layers * np.max([kept * waits + halved * halves for waits, halves in flying], axis=0)
    backward = np.maximum(one - kept, 0.0) + scores + 2 * tokens * c.width + 4 * tokens * c.ffn_width / c.tp
    has_head = (c.pp == 1) | folded if place == FIRST else (place == LAST) & ~folded
    at_once = np.where(folded, 1.0, np.max([waits + halves for waits, halves in flying], axis=0))
    logits = np.where(has_head, _logits(c, f, at_once), 0.0)
    gathering = np.where(sharded, 2 * (2 * block + c.reduce_bytes * block) + 2 * table, 0.0)
    largest = np.where(tables > 0, np.maximum(block, table), block)
    buffers = np.where(c.group_buffers > 0, _groups(c, largest, block + tables * table), gathering)
    once = (c.group_buffers > 0) & (c.num_microbatches == 1)  # gradients are reduced as soon as they are computed
    summed = (sharded & (c.each_microbatch > 0)) | ((c.zero == 2) & (c.reduce_each > 0)) | once
    moving = activations + np.maximum(backward, logits)
    return RankMemory(
        weights=2 * held / np.where(sharded & (c.regather > 0) & (c.each_microbatch > 0), shard, 1.0),
        gradients=c.sum_bytes * held / np.where(summed, shard, 1.0),
        optimizer=c.optimizer_bytes * held / shard,
        activations=activations,
        working=np.where(backward > logits, backward, 0.0), logits=np.where(backward > logits, 0.0, logits),
        gathered=buffers + c.flat_copies * (f["copied_bytes"] * held + 4 * held / shard),
        communicators=np.full(len(c), f["base_GiB"] * GIB),
        slack=f["slack"] * moving + f["unreused"] * np.minimum(backward, logits),
    )  # fmt: skip


def _activations(c: Columns, f: Factors) -> tuple[Column, Column, Column]:
    """Return bytes per block and micro-batch: all that backward needs, the part kept until then, and the scores.

    The formulas follow Korthikanti 2022.
    """
    tokens = c.microbatch * c.seq_len
    along = np.where(c.sequence_parallel > 0, c.tp, 1.0)
    heads, keys = c.num_heads * c.head_width / c.tp, c.num_kv_heads * c.head_width / c.tp
    gathered = np.where((c.sequence_parallel > 0) & (c.keeps_gathered > 0), 4 - 4 / along, 0.0)
    numbers = 8 + 2 * c.dropout + c.eager_norm * 2 * f["norm_kept"]
    residual = f["kept_residual"] * numbers * c.width / along + gathered * c.width
    attention = 2 * (heads + 2 * keys) + 2 * heads + np.where(c.pointwise == Pointwise.EAGER, 2 * (heads + keys), 0)
    fused = np.where(c.attention == Attention.FUSED, f["fused_kept"], 0.0)  # because: flash kernels never write scores
    scores = np.where(c.attention == Attention.SCORES, f["scores_kept"], fused) * c.num_heads / c.tp * c.seq_len
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
    products = tokens * 2 * (1 / along + 2) * c.width + tokens * (2 * (2 * heads + 2 * keys) + mlp / 2)
    only = (c.again_pointwise > 0) & (c.again_products == 0)
    some = c.again_pointwise * products + (1 - c.again_pointwise) * whole
    return whole, np.where(only, some, kept), tokens * scores


def _kept_for_weights(c: Columns) -> Column:
    """Return bytes per block and micro-batch between the halves of a backward: products' inputs and output gradients.

    Both cover the whole sequence, even if sequence parallelism cuts it outside of the products.
    """
    heads, keys = c.num_heads * c.head_width / c.tp, c.num_kv_heads * c.head_width / c.tp
    whole = np.where((c.parallel_block > 0) & (c.sequence_parallel == 0), 2.0, 4.0) * c.width
    products = 2 * heads + 2 * keys + (2 + c.gated) * c.ffn_width / c.tp
    return c.microbatch * c.seq_len * c.precision * (whole + products)


def _logits(c: Columns, f: Factors, at_once: Column) -> Column:
    """Return bytes of the loss being computed, plus the logits of the other `at_once` - 1 micro-batches."""
    numbers = c.microbatch * c.seq_len * c.scored_share * c.vocab
    split = np.where(c.whole_logits > 0, 1.0, c.tp)
    pieces = np.where((c.whole_logits > 0) & (c.tp > 1), 2 + 2 / c.tp, 0.0)  # gathered pieces before they are joined
    whole = numbers * (f.by_kind(("logit_eager", "logit_fused", "logit_compiled"), c.pointwise) / split + pieces)
    at_work = c.loss_bytes * np.minimum(numbers / split, c.loss_numbers)
    some = (2 - c.over_logits) * c.precision * numbers / split + at_work
    return np.where(c.loss_numbers > 0, some, whole) + (at_once - 1) * c.precision * numbers / split


def _groups(c: Columns, largest: Column, gathered: Column) -> Column:
    """Return bytes of FSDP's buffers for groups that are gathered and reduced in turn, even if they are not sharded."""
    shard = np.where(c.zero > 0, c.shard, 1.0)
    buffers = largest * (np.where(shard > 1, c.precision, 0.0) + c.reduce_bytes * (1 + 1 / shard))
    return np.where(c.dp > 1, buffers + np.where(c.zero == 3, c.precision * gathered, 0.0), 0.0)


def _in_flight(c: Columns, place: int) -> list[tuple[Column, Column]]:
    """Return micro-batches held at once, as pairs: those awaiting their backward, those between its halves.

    There are several pairs if the two counts peak at different times.
    """
    num, pp, vp, at = c.num_microbatches, c.pp, c.vp, float(place)
    if place == LAST:
        usual, double = np.ones(len(c)), pp
    else:  # each further stage holds one micro-batch fewer, or two chunks fewer if vp > 1
        group = np.ceil(num / np.maximum(num // pp, 1))  # micro-batches that pass a chunk in a row
        usual = np.where(vp > 1, (2 * (pp - 1 - at) + (vp - 1) * group + 1) / vp, pp - at)
        double = 2 * (pp - at) - 1
    put_off, folded = c.schedule == Schedule.ZB_1, c.schedule == Schedule.ZB_V
    waits = np.select([c.schedule == Schedule.ZB_2, folded, c.schedule == Schedule.GPIPE], [double, pp, num], usual)
    found = [(waits, np.zeros(len(c)))]
    late: list[Column] = [[], [np.ones(len(c)), pp - 2], [pp - 1]][place]  # deferred halves of the place's ranks
    for behind in late:
        found += [
            (np.where(put_off, pp - behind, 0.0), np.where(put_off, behind, np.where(folded, pp - 0.5, 0.0))),
            (np.where(put_off, pp - behind - 1, 0.0), np.where(put_off, behind + 1, 0.0)),
        ]
    return [(np.minimum(waits, num - np.minimum(halves, num)), np.minimum(halves, num)) for waits, halves in found]
