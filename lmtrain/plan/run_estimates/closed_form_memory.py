"""Bytes of the fullest rank by closed form: state kept between steps, memory added by a step, and overhead.

The first stage's rank holds the embedding and the most micro-batches, the last stage's the head and the logits, and
stages between them may have more layers: these three are computed, and the fullest counts. Arrays have an entry per run
in `cases`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from lmtrain.plan.cost_model.hardware_figures import FittedFactors
from lmtrain.plan.cost_model.step_time_and_energy import stage_weights
from lmtrain.plan.cost_model.training_workload import Attention, Cases, PerCase, Pointwise, Schedule

GIB = 2.0**30
FIRST, MIDDLE, LAST = range(3)  # stages; MIDDLE is the second stage, which holds most of the middle ones


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank by purpose, for each run."""

    weights: PerCase  # in compute precision, beside the master weights
    gradients: PerCase
    optimizer: PerCase  # master weights and moments
    activations: PerCase  # for all micro-batches in flight
    working: PerCase  # for the block in its backward: recomputed activations and gradients of activations
    logits: PerCase
    gathered: PerCase  # gathered blocks of sharded weights, gradient buckets
    communicators: PerCase  # NCCL, and the device's libraries
    slack: PerCase  # fragmentation of the allocator

    @property
    def total(self) -> PerCase:
        total: PerCase = np.sum([getattr(self, field.name) for field in fields(self)], axis=0)
        return total


def price_memory(cases: Cases, factors: FittedFactors) -> RankMemory:
    """Return the predicted bytes by purpose (weights, activations, ...) on the rank that needs most memory, for each
    run in `cases`; a formula, not a count.
    """
    fullest = _stage_memory(cases, factors, FIRST)
    for position in (MIDDLE, LAST):
        candidate = _stage_memory(cases, factors, position)
        is_fuller = candidate.total > fullest.total
        fullest = RankMemory(**{
            field.name: np.where(is_fuller, getattr(candidate, field.name), getattr(fullest, field.name))
            for field in fields(RankMemory)
        })  # fmt: skip
    return fullest


def _stage_memory(cases: Cases, factors: FittedFactors, position: int) -> RankMemory:
    """Return the predicted bytes by purpose (weights, activations, ...) on a rank of one pipeline stage, for each run
    in `cases`. `position` is the stage: FIRST, MIDDLE or LAST.
    """
    block, table = stage_weights(cases)
    folded = cases.schedule == Schedule.ZB_V  # the first rank has the first and the last stage
    # a weight that two stages of a rank share is there twice
    first_tables = np.where(folded | ((cases.pp == 1) & ~(cases.tied > 0)), 2.0, 1.0)
    num_tables = (first_tables, np.zeros(len(cases)), np.where(folded, 0.0, 1.0))[position]
    ends = (
        np.where(folded, cases.last_stage, cases.first_stage),
        np.where(folded, cases.largest_stage, cases.last_stage),
    )
    between = np.where(cases.pp > 2, cases.largest_stage, 0.0)  # no middle stage if pp is 2
    layers = np.where(cases.pp == 1, cases.num_layers, (ends[0], between, ends[1])[position])
    num_weights = layers * block + num_tables * table
    shard, sharded = cases.state_shards, cases.zero == 3
    all_bytes, kept_bytes, scores = _activation_bytes(cases, factors)
    in_flight = _micro_batches_in_flight(cases, position)
    half_bytes = _deferred_backward_bytes(cases)
    activations = layers * np.max([kept_bytes * waiting + half_bytes * halves for waiting, halves in in_flight], axis=0)
    backward = (
        np.maximum(all_bytes - kept_bytes, 0.0)
        + scores
        + 2 * cases.tokens * cases.width
        + 4 * cases.tokens * cases.ffn_width / cases.tp
    )
    has_head = (cases.pp == 1) | folded if position == FIRST else (position == LAST) & ~folded
    # because: of several chunks the last one's backward follows its forward at once
    at_once = np.where(cases.vp > 1, 1.0, np.max([waiting + halves for waiting, halves in in_flight], axis=0))
    logits = np.where(has_head, _logits_bytes(cases, factors, at_once), 0.0)
    gathering = np.where(sharded, 2 * (2 * block + cases.reduce_bytes * block) + 2 * table, 0.0)
    largest = np.where(num_tables > 0, np.maximum(block, table), block)
    buffers = np.where(
        cases.group_buffers > 0, _group_buffer_bytes(cases, largest, block + num_tables * table), gathering
    )
    # gradients are reduced as soon as they are computed
    is_single = (cases.group_buffers > 0) & (cases.num_microbatches == 1)
    is_reduced_early = (
        (sharded & (cases.each_microbatch > 0)) | ((cases.zero == 2) & (cases.reduce_each > 0)) | is_single
    )
    transient = activations + np.maximum(backward, logits)
    # because: FSDP computes with gathered weights, and fp32 masters that nothing shards are the weights
    is_released = sharded & (cases.regather > 0) & (cases.each_microbatch > 0)
    is_master = ((cases.precision == 4) & (cases.dp == 1)) | (is_released & (cases.group_buffers > 0))
    return RankMemory(
        weights=np.where(is_master, 0.0, cases.precision * num_weights / np.where(is_released, shard, 1.0)),
        gradients=cases.sum_bytes * num_weights / np.where(is_reduced_early, shard, 1.0),
        optimizer=cases.optimizer_bytes * num_weights / shard,
        activations=activations,
        working=np.where(backward > logits, backward, 0.0), logits=np.where(backward > logits, 0.0, logits),
        gathered=buffers + cases.flat_copies * (factors["copied_bytes"] * num_weights + 4 * num_weights / shard),
        communicators=np.full(len(cases), factors["base_GiB"] * GIB),
        slack=factors["slack"] * transient + factors["unreused"] * np.minimum(backward, logits),
    )  # fmt: skip


def _activation_bytes(cases: Cases, factors: FittedFactors) -> tuple[PerCase, PerCase, PerCase]:
    """Return three sizes in bytes of one block's activations for one micro-batch, for each run in `cases`: all that its
    backward reads, the part kept from forward to backward (the rest is recomputed), and the attention scores.

    The formulas follow Korthikanti 2022.
    """
    tokens, seq_shards = cases.tokens, cases.sequence_shards
    heads, keys = cases.query_width, cases.key_width
    gathered = np.where((cases.sequence_parallel > 0) & (cases.keeps_gathered > 0), 4 - 4 / seq_shards, 0.0)
    residual_bytes = 8 + 2 * cases.extra_norms + 2 * cases.dropout + cases.eager_norm * 2 * factors["norm_kept"]
    residual = factors["kept_residual"] * residual_bytes * cases.width / seq_shards + gathered * cases.width
    attention = 2 * (heads + 2 * keys) + 2 * heads + np.where(cases.pointwise == Pointwise.EAGER, 2 * (heads + keys), 0)
    attention = attention + cases.qk_norm * 2 * (heads + keys)  # normalized, before their weight
    # because: flash kernels never write scores
    fused = np.where(cases.attention == Attention.FUSED, factors["fused_kept"], 0.0)
    scores = (
        np.where(cases.attention == Attention.SCORES, factors["scores_kept"], fused)
        * cases.num_heads
        / cases.tp
        * cases.seq_len
    )
    lse = np.where(cases.attention >= Attention.FLASH1, 4 * cases.num_heads / cases.tp, 0)
    mlp = np.where(cases.gated > 0, 8.0, 4.0) * cases.ffn_width / cases.tp
    kernel_factor = factors.by_index(("kept_eager", "kept_fused", "kept_compiled"), cases.pointwise)
    all_bytes = tokens * (residual + kernel_factor * (attention + mlp) + scores + lse)
    checkpoint = tokens * 2 * cases.width / seq_shards
    without_scores = all_bytes - tokens * scores * np.minimum(cases.recomputed_attention, 1.0)
    is_full = cases.recomputed_products >= 1.0
    is_partial = (cases.recomputed_products > 0) & ~is_full
    kept = np.where(
        is_full,
        checkpoint,
        np.where(is_partial, (1 - cases.recomputed_products) * all_bytes + checkpoint, without_scores),
    )
    kept = np.where((cases.recomputed_products > 0) & (cases.recomputed_attention == 0), 0.45 * all_bytes, kept)
    products = tokens * 2 * (1 / seq_shards + 2) * cases.width + tokens * (2 * (2 * heads + 2 * keys) + mlp / 2)
    is_pointwise_only = (cases.recomputed_pointwise > 0) & (cases.recomputed_products == 0)
    partly_kept = cases.recomputed_pointwise * products + (1 - cases.recomputed_pointwise) * all_bytes
    return all_bytes, np.where(is_pointwise_only, partly_kept, kept), tokens * scores


def _deferred_backward_bytes(cases: Cases) -> PerCase:
    """Return the bytes per block and micro-batch that stay between the two halves of a split backward (zero-bubble
    schedules): the inputs and output gradients of matrix products, from which weight gradients are computed later.

    Both cover the whole sequence, even if sequence parallelism cuts it outside of the products.
    """
    block_inputs = np.where((cases.parallel_block > 0) & (cases.sequence_parallel == 0), 2.0, 4.0) * cases.width
    products = 2 * cases.query_width + 2 * cases.key_width + (2 + cases.gated) * cases.ffn_width / cases.tp
    return cases.tokens * cases.precision * (block_inputs + products)


def _logits_bytes(cases: Cases, factors: FittedFactors, num_held: PerCase) -> PerCase:
    """Return the bytes of logits on a rank with the output head: the logits and loss of one micro-batch, plus the
    logits of the other `num_held` - 1 micro-batches that the rank holds.
    """
    num_logits = cases.tokens * cases.scored_share * cases.vocab
    split = np.where(cases.whole_logits > 0, 1.0, cases.tp)
    # before they are joined
    gathered_pieces = np.where((cases.whole_logits > 0) & (cases.tp > 1), 2 + 2 / cases.tp, 0.0)
    at_once_bytes = num_logits * (
        factors.by_index(("logit_eager", "logit_fused", "logit_compiled"), cases.pointwise) / split + gathered_pieces
    )
    working = cases.loss_bytes * np.minimum(num_logits / split, cases.loss_numbers)
    in_pieces = (2 - cases.over_logits) * cases.precision * num_logits / split + working
    # a cap keeps its tanh and a bool for each logit
    kept_per_logit = cases.precision + cases.capped_logits * (cases.precision + 1)
    return (
        np.where(cases.loss_numbers > 0, in_pieces, at_once_bytes)
        + cases.capped_logits * (cases.precision + 1) * num_logits / split
        + (num_held - 1) * kept_per_logit * num_logits / split
    )


def _group_buffer_bytes(cases: Cases, largest_group: PerCase, gathered_weights: PerCase) -> PerCase:
    """Return the bytes of FSDP's buffers on a rank, for each run in `cases`; 0 without data parallelism.
    `largest_group` is the number of weights in the largest unit that FSDP gathers and reduces at once (such as a
    block), `gathered_weights` the number that ZeRO 3 keeps gathered.
    """
    shard = cases.state_shards
    buffers = largest_group * (np.where(shard > 1, cases.precision, 0.0) + cases.reduce_bytes * (1 + 1 / shard))
    return np.where(cases.dp > 1, buffers + np.where(cases.zero == 3, cases.precision * gathered_weights, 0.0), 0.0)


def _micro_batches_in_flight(cases: Cases, position: int) -> list[tuple[PerCase, PerCase]]:
    """Return pairs of numbers of micro-batches whose activations a pipeline stage holds at the same time, for each run
    in `cases`: those that await their backward, and those between the two halves of a split backward. `position` is the
    stage: FIRST, MIDDLE or LAST.

    Both counts of a pair hold at the same time. There are several pairs if the two counts peak at different times.
    """
    num_microbatches, pp, vp = cases.num_microbatches, cases.pp, cases.vp
    index = pp - 1 if position == LAST else np.full(len(cases), float(position))
    # micro-batches that pass a chunk in a row
    group = np.ceil(num_microbatches / np.maximum(num_microbatches // pp, 1))
    # each further stage holds one micro-batch fewer, or two chunks fewer if vp > 1
    one_f_one_b = np.where(vp > 1, (2 * (pp - 1 - index) + (vp - 1) * group + 1) / vp, pp - index)
    doubled = pp if position == LAST else 2 * (pp - index) - 1
    is_zb_1, is_zb_v = cases.schedule == Schedule.ZB_1, cases.schedule == Schedule.ZB_V
    waiting = np.select(
        [cases.schedule == Schedule.ZB_2, is_zb_v, cases.schedule == Schedule.GPIPE],
        [doubled, pp, num_microbatches],
        one_f_one_b,
    )
    pairs = [(waiting, np.zeros(len(cases)))]
    deferred_counts: list[PerCase] = [[], [np.ones(len(cases)), pp - 2], [pp - 1]][
        position
    ]  # deferred halves of the place's ranks
    for deferred in deferred_counts:
        pairs += [
            (np.where(is_zb_1, pp - deferred, 0.0), np.where(is_zb_1, deferred, np.where(is_zb_v, pp - 0.5, 0.0))),
            (np.where(is_zb_1, pp - deferred - 1, 0.0), np.where(is_zb_1, deferred + 1, 0.0)),
        ]
    return [
        (
            np.minimum(waiting, num_microbatches),
            np.minimum(halves, num_microbatches - np.minimum(waiting, num_microbatches)),
        )
        for waiting, halves in pairs
    ]
