"""Seconds and joules of a training step: computation on a device, collectives, the pipeline and their overlap.

Computation is priced per micro-batch and transformer block, and for the output head: matrix products by shape,
attention by kernel, other operations by memory traffic. Exposed collectives (all-reduce, all-gather, reduce-scatter),
messages and the pipeline bubble are added. Called by code that prices layouts. Arrays have an entry per run in `cases`.
This module does not depend on settings or on schedule tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtrain.plan.cost_model.hardware_figures import FittedFactors, Hardware
from lmtrain.plan.cost_model.training_workload import Attention, Cases, Overlap, PerCase, Pointwise, Schedule

SUSTAIN_FACTORS = ("sustain_volta", "sustain_ampere", "sustain_hopper", "sustain_blackwell", "sustain_ampere")
TILE_SIZES = ((256, 128), (128, 128))
NORM_PASSES, FLASH_BACKWARD = 11.0, 2.5
EXTRA_NORM_PASSES = 3.0  # reads and writes per number of a norm alone
SCALE_PASSES, CAP_PASSES = 4.0, 24.0  # reads and writes per logit of single operations, forward and backward
EAGER_ROTARY = 10.0  # reads and writes per number: two products, a rotated copy of two halves, a sum
IDLE_POWER_SHARE = 0.80  # share of the device's power that it draws all through a step
COMPUTE_POWER_SHARE = 0.18  # further share of its power, times the share of the step in which it computes


@dataclass(frozen=True)
class WorkSeconds:
    """Seconds of a block's forward and backward by kind of work, and of the output head in both directions."""

    products: PerCase
    attention: PerCase
    pointwise: PerCase
    products_back: PerCase
    attention_back: PerCase
    pointwise_back: PerCase
    head: PerCase

    @property
    def forward(self) -> PerCase:
        return self.products + self.attention + self.pointwise

    @property
    def backward(self) -> PerCase:
        """Seconds of the backward, without recompute."""
        return self.products_back + self.attention_back + self.pointwise_back


def price_work(cases: Cases, factors: FittedFactors) -> WorkSeconds:
    """Return the predicted seconds of computation for one micro-batch on one tensor-parallel rank, for each run in
    `cases`: of one transformer block by kind of work (matrix products, attention, pointwise operations), and of the
    output head with its loss. Communication is not included.
    """
    shapes = (
        (cases.query_width + 2 * cases.key_width, cases.width),
        (cases.width, cases.query_width),
        (cases.ffn_width * (1 + cases.gated) / cases.tp, cases.width),
        (cases.width, cases.ffn_width / cases.tp),
    )
    forward, backward = (
        sum((seconds(cases, factors, cases.tokens, out, inner) for out, inner in shapes), np.zeros(len(cases)))
        for seconds in (product_seconds, _backward_seconds)
    )
    attention, attention_back = _attention_seconds(cases, factors)
    pointwise, pointwise_back = _pointwise_seconds(cases, factors)
    columns, scored = cases.vocab / cases.tp, cases.tokens * cases.scored_share
    head = product_seconds(cases, factors, scored, columns, cases.width, in_16_bits=True) + _backward_seconds(
        cases, factors, scored, columns, cases.width, in_16_bits=True
    )
    loss_bytes = factors["loss_bytes"] * np.where(cases.fused_loss > 0, factors["loss_fused"], 1.0)
    loss = (
        scored * np.where(cases.whole_logits > 0, cases.vocab, columns) * loss_bytes / _memory_bandwidth(cases, factors)
    )
    logit_passes = cases.scaled_logits * SCALE_PASSES + cases.capped_logits * CAP_PASSES
    finish = scored * columns * cases.precision * logit_passes / _memory_bandwidth(cases, factors)
    return WorkSeconds(forward, attention, pointwise, backward, attention_back, pointwise_back, head + loss + finish)


def product_seconds(
    cases: Cases, factors: FittedFactors, rows: PerCase, columns: PerCase, inner: PerCase, *, in_16_bits: bool = False
) -> PerCase:
    """Return the seconds of the matrix product [rows, inner] x [inner, columns], for each run in `cases`. With
    `in_16_bits`, its inputs have 16 bits even in runs whose other products have 8-bit or 4-bit inputs.
    """
    low_kind = np.where(in_16_bits, 0, cases.low_precision)
    low_speed = factors.by_index(("sustain_low", "sustain_low", "sustain_low", "sustain_4bit", "sustain_low"), low_kind)
    peak = np.where(
        low_kind > 0, cases.peak * low_speed * np.where(low_kind == 4, factors["sustain_row"], 1.0), cases.half_peak
    )
    is_unaligned = (rows % 64 > 0) | (columns % 64 > 0) | (inner % 64 > 0)
    reached_share = (
        factors.by_index(SUSTAIN_FACTORS, cases.generation)
        * cases.sustained
        * np.where(is_unaligned, factors["unaligned"], 1.0)
    )
    ramp = 1 + factors["side_ramp"] * (1 / rows + 1 / columns + 1 / inner)
    seconds = 2 * rows * columns * inner / (peak * reached_share * _fill_share(cases, factors, rows, columns)) * ramp
    bytes_moved = cases.precision * (rows * columns + rows * inner + columns * inner)
    cast = np.where(low_kind > 0, factors["cast_passes"] * (rows + columns) * inner, 0)
    return (
        np.maximum(seconds, bytes_moved / _memory_bandwidth(cases, factors))
        + cast / _memory_bandwidth(cases, factors)
        + factors["gap_s"]
    )


def _backward_seconds(
    cases: Cases, factors: FittedFactors, rows: PerCase, columns: PerCase, inner: PerCase, *, in_16_bits: bool = False
) -> PerCase:
    """Return the seconds of the backward of the matrix product [rows, inner] x [inner, columns], for each run in
    `cases`: two products, for the gradients of its input and of its weight. With `in_16_bits`, inputs have 16 bits in
    all runs.
    """
    return product_seconds(cases, factors, rows, inner, columns, in_16_bits=in_16_bits) + product_seconds(
        cases, factors, columns, inner, rows, in_16_bits=in_16_bits
    )


def _fill_share(cases: Cases, factors: FittedFactors, rows: PerCase, columns: PerCase) -> PerCase:
    """Return the relative speed, in (0, 1], of a matrix product with a [rows, columns] result. The result is computed
    in tiles, one per core at a time; the speed is below 1 if the last round has tiles for only some of the cores.
    """
    best = np.zeros(len(cases))
    for height, breadth in TILE_SIZES:
        num_tiles = np.ceil(rows / height) * np.ceil(columns / breadth)
        fill = (rows / height) * (columns / breadth) / (np.ceil(num_tiles / cases.num_cores) * cases.num_cores)
        best = np.maximum(best, fill ** factors["fill_power"] * (1.0 if height == 256 else factors["small_tile"]))
    return best


def _attention_seconds(cases: Cases, factors: FittedFactors) -> tuple[PerCase, PerCase]:
    """Return the forward and the backward seconds of attention for one micro-batch in one transformer block on one
    tensor-parallel rank, for each run in `cases`: of scores, softmax and the weighted sum of values, without the
    projections before and after.
    """
    flash = cases.attention >= Attention.FLASH1
    newer = np.where((cases.attention == Attention.FLASH2) & (cases.generation >= 2), factors["flash2_newer"], 1.0)
    shares = factors.by_index(
        ("scores_share", "scores_share", "flash1_share", "flash2_share", "cudnn_share"), cases.attention
    )
    rate = (
        cases.half_peak
        * cases.sustained
        * shares
        * newer
        * np.where(cases.head_width % 8 > 0, factors["odd_heads"], 1.0)
    )
    causal = np.where(cases.causal * flash > 0, 0.5 * (1 + 128 / cases.seq_len), 1.0)
    window_share = np.where(cases.window > 0, cases.window_share, 0.0)
    # because: the factors are fitted to runs whose layers all have a window and count as causal too
    in_window = np.minimum(cases.window, cases.seq_len) * np.where(window_share < 1, 1.0, causal)
    visible = window_share * in_window + (1 - window_share) * cases.seq_len * causal
    flops = 4 * cases.tokens * visible * cases.num_heads * cases.head_width / cases.tp
    narrow = np.where(cases.attention == Attention.FLASH1, 0.0, factors["head_ramp"] / cases.head_width)
    ramp = np.where(flash, (1 + factors["seq_ramp"] / cases.seq_len) * (1 + narrow), 1.0)
    seconds = flops * ramp / rate
    bytes_per_score = (
        np.where(cases.attention == Attention.SCORES, factors["scores_bytes"], factors["fused_bytes"])
        * cases.precision
        / 2
    )
    num_scores = cases.tokens * cases.seq_len * cases.num_heads / cases.tp
    traffic = bytes_per_score * num_scores / _memory_bandwidth(cases, factors)
    return (
        np.where(flash, seconds, seconds + 0.4 * traffic),
        np.where(flash, seconds * FLASH_BACKWARD, 2 * seconds + 0.6 * traffic),
    )


def _pointwise_seconds(cases: Cases, factors: FittedFactors) -> tuple[PerCase, PerCase]:
    """Return the forward and the backward seconds of pointwise operations (norms, activation function, residual sums,
    rotary embedding) for one micro-batch in one transformer block on one tensor-parallel rank, for each run in `cases`.

    The least possible memory traffic is scaled by a factor for eager, fused or compiled kernels.
    """
    residual = NORM_PASSES * cases.width / cases.sequence_shards * np.where(cases.parallel_block > 0, 0.6, 1.0)
    residual = residual + EXTRA_NORM_PASSES * cases.extra_norms * cases.width / cases.sequence_shards
    mlp = np.where(cases.gated > 0, 3.0, 2.0) * cases.ffn_width / cases.tp
    rotary_passes = cases.rotary * np.where(
        (cases.pointwise == Pointwise.EAGER) & (cases.fused_rotary == 0), EAGER_ROTARY, 2.0
    )
    qk_passes = 2 + rotary_passes + EXTRA_NORM_PASSES * cases.qk_norm
    numbers = residual + mlp + qk_passes * (cases.query_width + cases.key_width)
    passes = factors.by_index(("passes_eager", "passes_fused", "passes_compiled"), cases.pointwise)
    norms = cases.eager_norm * 2 * factors["norm_bytes"] * cases.width / cases.sequence_shards
    at_once = 2 * cases.tokens * cases.precision * cases.width / cases.sequence_shards  # bytes that a pass moves
    missed = 1 - factors["cached"] * np.minimum(cases.cache / at_once, 1.0) ** 2
    seconds = cases.tokens * cases.precision * numbers * passes * missed / _memory_bandwidth(cases, factors)
    norm_s = cases.tokens * norms * missed / _memory_bandwidth(cases, factors)
    kernels = (
        np.where(cases.pointwise == Pointwise.EAGER, 24, np.where(cases.pointwise == Pointwise.FUSED, 10, 5))
        * factors["gap_s"]
    )
    return seconds + 0.4 * norm_s + kernels, 1.6 * seconds + 0.6 * norm_s + 1.6 * kernels


def _memory_bandwidth(cases: Cases, factors: FittedFactors) -> PerCase:
    """Return the bytes per second that a streaming kernel reads and writes."""
    return cases.memory_Bps * factors["stream_share"]


@dataclass(frozen=True)
class CommunicationGroup:
    """The ranks of a collective, for each run: how many, and the links between them."""

    num_ranks: PerCase
    bytes_per_s: PerCase  # bandwidth of the ring's slowest link
    latency_s: PerCase  # of a trip around the ring
    tree_s: PerCase  # of an all-reduce, which may use a tree instead of the ring

    def all_gather_seconds(self, num_bytes: PerCase) -> PerCase:
        """Return seconds of an all-gather or of a reduce-scatter; `num_bytes` is the whole tensor, in equal shards."""
        sent_share = (self.num_ranks - 1) / np.maximum(self.num_ranks, 1)
        return np.where(self.num_ranks > 1, sent_share * num_bytes / self.bytes_per_s + self.latency_s, 0.0)

    def all_reduce_seconds(self, num_bytes: PerCase) -> PerCase:
        """Return seconds of an all-reduce, which costs as much as a reduce-scatter and an all-gather."""
        sent_share = (self.num_ranks - 1) / np.maximum(self.num_ranks, 1)
        return np.where(self.num_ranks > 1, 2 * (sent_share * num_bytes / self.bytes_per_s + self.tree_s), 0.0)


def tp_group(cases: Cases, factors: FittedFactors) -> CommunicationGroup:
    """Return the tensor-parallel group of a rank, for each run in `cases`."""
    return _group(cases, factors, cases.tp, np.ones(len(cases)))


def dp_group(cases: Cases, factors: FittedFactors, size: PerCase) -> CommunicationGroup:
    """Return a group of `size` data-parallel ranks, whose rank numbers are tp apart, for each run in `cases`."""
    return _group(cases, factors, size, cases.tp)


def replica_group(cases: Cases, factors: FittedFactors) -> CommunicationGroup:
    """Return the group of ranks that hold the same shard (the data-parallel replicas), for each run in `cases`."""
    return _group(cases, factors, np.maximum(cases.dp / cases.shard, 1.0), cases.tp * cases.shard)


def _group(cases: Cases, factors: FittedFactors, size: PerCase, stride: PerCase) -> CommunicationGroup:
    """Return the bandwidth and latency of a communication group, for each run in `cases`. The group has `size` ranks,
    and the numbers of neighboring ranks differ by `stride`.
    """
    local = ranks_per_node(cases, size, stride)
    link = cases.link_Bps * factors["link_share"]
    nic = (
        cases.nic_Bps
        * nic_share(cases, factors)
        * np.minimum(local * stride, cases.node)
        / cases.node
        / np.minimum(stride, cases.node)
    )
    nodes = np.ceil(size / local)
    inside_s = factors["link_latency_s"] + 1e-6 * local
    between = nodes > 1
    # because: NCCL switches large groups from rings to trees, whose depth grows with the logarithm of their size
    ring = factors["hop_latency_s"] * (nodes - 1) + factors["step_latency_s"] * (size - nodes)
    tree = np.minimum(ring, 12 * factors["hop_latency_s"] * np.log2(np.maximum(nodes, 2)))
    return CommunicationGroup(
        size, np.where(between, np.minimum(link, nic), link), inside_s + np.where(between, ring, 0.0),
        inside_s + np.where(between, tree, 0.0),
    )  # fmt: skip


def ranks_per_node(cases: Cases, size: PerCase, stride: PerCase) -> PerCase:
    """Return how many ranks of a communication group share a node, for each run in `cases`; the least number if its
    nodes have different numbers. The group has `size` ranks, and the numbers of neighboring ranks differ by `stride`.

    A group that lies across two nodes may have few of its ranks in one of them. A run is spread evenly over as few
    nodes as possible: 128 devices are 64 in each of two racks of 72. A group that spans the whole run has all the
    devices of a node: of 15 devices on nodes of 8, at least 7.
    """
    devices = cases.pp * cases.dp * cases.tp
    per_node = np.floor(devices / np.ceil(devices / cases.node))
    span = np.rint(size * stride)
    same_node = np.where(span >= devices, per_node, np.gcd(per_node.astype(np.int64), span.astype(np.int64)))
    return np.clip(np.floor(same_node / stride), 1, size)


def nic_share(cases: Cases, factors: FittedFactors) -> PerCase:
    """Return the share of the network adapters' bandwidth that collectives reach on each run's kind of network."""
    return factors.by_index(("nic_share", "nic_share_other", "nic_share_omnipath"), cases.network)


def send_seconds(cases: Cases, factors: FittedFactors, num_bytes: PerCase) -> PerCase:
    """Return the seconds that a pipeline message of `num_bytes` bytes takes from a rank to the neighboring pipeline
    stage, for each run in `cases`, while all ranks of the stage send theirs.

    A rank has two neighbours. If several stages share a node, the first and last stage of the node have a boundary
    inside the node and another between nodes, and these stages set the pace.
    """
    stage = cases.tp * cases.dp
    outside = np.where(stage * cases.pp <= cases.node, 0.0, np.where(stage * 2 <= cases.node, 0.5, 1.0))
    inside_s = num_bytes / (cases.link_Bps * factors["link_share"]) + factors["link_latency_s"]
    between_s = num_bytes / (cases.nic_Bps / cases.node * nic_share(cases, factors)) + 2 * factors["hop_latency_s"]
    return inside_s + outside * (between_s - inside_s)


def makespan(
    cases: Cases,
    forward: PerCase,
    backward: PerCase,
    weight_half: PerCase,
    last_stage: PerCase,
    fullest_stage: PerCase,
    last_weight_half: PerCase,
) -> PerCase:
    """Return the seconds of the pipeline for all micro-batches of a step, by closed form. The other parameters are
    seconds of one micro-batch: `forward`, `backward` and its part `weight_half` (weight gradients) in an average stage;
    `last_stage` and `fullest_stage` in both directions; `last_weight_half` in the last stage.

    The average is over stages other than the last, with all chunks of a stage. `weight_half` is the part of `backward`
    that no other stage waits for. `last_stage` includes the head; `fullest_stage` has most layers among the others.

    With many micro-batches, the slowest stage is always busy except for the bubble. With few, the step takes the
    passage of the first micro-batch plus the part of every other micro-batch that follows it.
    """
    num, pp, vp, num_others = cases.num_microbatches, cases.pp, cases.vp, cases.pp - 1
    pace = np.maximum(last_stage, fullest_stage)
    passage = num_others * (forward + backward) + last_stage
    one_f_one_b = np.maximum(num * pace + (passage - pace) / vp, passage + (num - 1) * pace / vp)
    early_passage = passage - num_others * weight_half  # the passage if the weight halves are deferred
    # of the slowest stage
    deferred = np.where(last_stage > fullest_stage, last_weight_half, weight_half)
    zb_h1 = np.maximum(
        num * pace + num_others * (forward + np.maximum(backward - weight_half - deferred, 0.0)),
        early_passage + (num - 1) * (pace - deferred),
    )
    zb_v = np.maximum(
        num * pace + num_others * np.maximum.reduce([forward, backward - weight_half, weight_half]) / 2,
        early_passage + (num - 1) * (pace - forward),
    )
    halves = (cases.schedule != Schedule.ONE_F_ONE_B) & (cases.schedule != Schedule.GPIPE)
    return np.where(
        pp == 1, num * last_stage, np.where(halves, np.where(cases.schedule == Schedule.ZB_1, zb_h1, zb_v), one_f_one_b)
    )


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause, for each run; `total` is the whole step."""

    compute: PerCase  # of all microbatches on the busiest rank
    tp: PerCase  # exposed collectives of tensor parallelism, included in `compute`
    sends: PerCase  # waiting for pipeline messages, included in `compute`
    bubble: PerCase
    sharded: PerCase  # exposed gathers and reductions of sharded weights (zero 3)
    reduce: PerCase  # exposed gradient reduction over dp
    update: PerCase
    fixed: PerCase
    stragglers: PerCase

    @property
    def total(self) -> PerCase:
        return (
            self.compute + self.bubble + self.sharded + self.reduce + self.update + self.fixed + self.stragglers
        )


def stage_weights(cases: Cases) -> tuple[PerCase, PerCase]:
    """Return two numbers of weights (elements) on one tensor-parallel rank, for each run in `cases`: of one transformer
    block, and of the vocabulary matrix.
    """
    heads, keys = cases.num_heads * cases.head_width, np.maximum(cases.num_kv_heads, cases.tp) * cases.head_width
    block = cases.width * (2 * heads + 2 * keys) + cases.width * cases.ffn_width * (2 + cases.gated)
    return block / cases.tp, cases.vocab * cases.width / cases.tp


@dataclass(frozen=True)
class MicrobatchSeconds:
    """Seconds of one micro-batch in one block, and the extra seconds of a rank and of the last stage, for each run."""

    forward: PerCase
    backward: PerCase
    weight: PerCase  # part of `backward` that no other stage waits for
    tp: PerCase  # exposed collectives of tensor parallelism, forward and backward
    gather: PerCase  # all-gather of a block's sharded weights
    reduce: PerCase  # reduce-scatter of a block's gradients
    head: PerCase  # in the last stage, forward and backward
    sends: PerCase  # a rank's waiting for messages, forward and backward


def price_microbatch(cases: Cases, factors: FittedFactors) -> MicrobatchSeconds:
    """Return the predicted seconds of one micro-batch in one transformer block and in the output head, for each run in
    `cases`, by kind of operation. Recomputation is included, and of tensor-parallel collectives the time that
    computation does not hide.
    """
    work = price_work(cases, factors)
    block, table = stage_weights(cases)
    # tensor parallelism: per block two collectives forward, two backward, and those of recompute
    all_reduce = tp_group(cases, factors).all_reduce_seconds(cases.tokens * cases.width * cases.precision)
    exposed = factors.by_index(("tp_exposed_none", "tp_exposed_weights", "tp_exposed_chunked"), cases.tp_overlap)
    tp_forward = 2 * all_reduce * np.where(cases.tp_overlap == Overlap.CHUNKED, factors["tp_exposed_chunked"], 1.0)
    tp_backward = 2 * all_reduce * exposed + cases.recomputed_collectives * tp_forward
    recompute = (
        cases.recomputed_products * work.products
        + cases.recomputed_attention * work.attention
        + cases.recomputed_pointwise * work.pointwise
    )
    # sharded weights: in each micro-batch, gathered for forward and backward, and their gradients reduced
    shard_group = dp_group(cases, factors, np.where(cases.zero == 3, cases.shard, 1.0))
    logits = np.where(
        cases.whole_logits > 0,
        tp_group(cases, factors).all_gather_seconds(cases.tokens * cases.scored_share * cases.vocab * cases.precision),
        0.0,
    )
    boundary = cases.tokens * cases.width * cases.precision / np.where(cases.whole_messages > 0, 1.0, cases.tp)
    exposed_sends = np.where(cases.send_overlap > 0, factors["send_overlapped"], factors["send_exposed"])
    return MicrobatchSeconds(
        forward=work.forward + tp_forward,
        backward=work.backward + recompute + tp_backward + _accumulate_seconds(cases, factors, block),
        weight=work.products_back / 2, tp=tp_forward + tp_backward,
        gather=shard_group.all_gather_seconds(cases.precision * block),
        reduce=shard_group.all_gather_seconds(cases.reduce_bytes * block),
        head=work.head + logits + _accumulate_seconds(cases, factors, table)
        + all_reduce * np.where(cases.tp > 1, 1.0, 0),
        sends=np.where(cases.pp > 1, 2 * exposed_sends * cases.vp * send_seconds(cases, factors, boundary), 0.0),
    )  # fmt: skip


def price_step(cases: Cases, factors: FittedFactors, replayed_pipeline_s: PerCase | None = None) -> StepTime:
    """Return the predicted seconds of a training step by cause (computation, bubble, gradient reduction, ...), for each
    run in `cases`. `replayed_pipeline_s`, if given, holds each run's pipeline seconds from a simulation; otherwise a
    formula estimates them.
    """
    micro = price_microbatch(cases, factors)
    block, table = stage_weights(cases)
    layers = cases.largest_stage
    hidden_forward = np.minimum(micro.gather, micro.forward)
    backward_collectives = micro.gather * cases.regather + micro.reduce
    hidden_back = np.minimum(backward_collectives, micro.backward)
    sharded_block = (
        (micro.gather - hidden_forward) + (backward_collectives - hidden_back)
        + factors["fsdp_exposed"] * (hidden_forward + hidden_back)
        + factors["contention"] * (hidden_forward + hidden_back)
    )  # fmt: skip
    shard_group = dp_group(cases, factors, np.where(cases.zero == 3, cases.shard, 1.0))
    sharded_table = 2 * shard_group.all_gather_seconds(cases.precision * table) + shard_group.all_gather_seconds(
        cases.reduce_bytes * table
    )
    sharded_s = np.where(cases.each_microbatch > 0, cases.num_microbatches, 1.0) * (
        layers * sharded_block + sharded_table
    )
    # the pipeline
    # mean over all stages but the last; because: with several chunks per rank, the longest delay all others in turn
    mean_layers = np.where(
        (cases.pp > 1) & (cases.vp == 1), (cases.num_layers - cases.last_stage) / np.maximum(cases.pp - 1, 1), layers
    )
    forward, backward = mean_layers * micro.forward + micro.sends / 2, mean_layers * micro.backward + micro.sends / 2
    fullest = layers * (micro.forward + micro.backward) + micro.sends
    last = cases.last_stage * (micro.forward + micro.backward) + micro.head + micro.sends
    weight_last = cases.last_stage * micro.weight + micro.head / 3
    pipeline_s = (
        makespan(cases, forward, backward, mean_layers * micro.weight, last, fullest, weight_last)
        if replayed_pipeline_s is None
        else replayed_pipeline_s
    )
    busy = cases.num_microbatches * np.maximum(last, np.where(cases.pp > 1, fullest, 0.0))
    # gradients and weights over dp, once a step
    num_weights = layers * block + table
    reduce_s, gather_s = _data_parallel_seconds(cases, factors, num_weights)
    hidden_reduce = np.minimum(reduce_s, np.where(cases.pp > 1, 0.5, 1.0) * layers * micro.backward)
    reduce_exposed = np.where((cases.zero == 2) & (cases.reduce_each > 0), cases.num_microbatches, 1.0) * np.where(
        cases.reduce_overlap > 0,
        (reduce_s - hidden_reduce) + (factors["dp_exposed"] + factors["contention"]) * hidden_reduce,
        reduce_s,
    )
    gather_exposed = np.where(cases.gather_overlap > 0, factors["dp_exposed"] * gather_s, gather_s)
    updated_weights = num_weights / cases.state_shards
    update_s = (
        updated_weights
        * (
            factors["update_bytes"] * np.where(cases.fused_optimizer > 0, 1.0, factors["update_eager"])
            + cases.average_bytes
        )
        / _memory_bandwidth(cases, factors)
    )
    base = pipeline_s + sharded_s + reduce_exposed + gather_exposed + update_s
    straggler_s = base * factors["straggler"] * np.sqrt(2 * np.log(np.maximum(cases.pp * cases.dp * cases.tp / 4, 1.0)))
    return StepTime(
        compute=busy, tp=cases.num_microbatches * layers * micro.tp,
        sends=cases.num_microbatches * micro.sends, bubble=np.maximum(pipeline_s - busy, 0.0),
        sharded=sharded_s, reduce=reduce_exposed + gather_exposed, update=update_s,
        fixed=np.full(len(cases), factors["step_s"]), stragglers=straggler_s,
    )  # fmt: skip


def _accumulate_seconds(cases: Cases, factors: FittedFactors, num_weights: PerCase) -> PerCase:
    """Return the seconds that it takes to add one micro-batch's gradients of `num_weights` weights to the step's sum,
    for each run in `cases`: the memory traffic of reading both and writing the sum.

    Gradients have the compute precision; their sum has its own number of bytes, four in our runs. A shard's sum is
    short, and its traffic is neglected.
    """
    has_no_sum = ((cases.zero == 2) & (cases.reduce_each > 0)) | ((cases.zero == 3) & (cases.each_microbatch > 0))
    fused = (cases.fused_gradients > 0) & (cases.num_microbatches >= cases.fused_gradients) & ~has_no_sum
    sums = np.where((cases.zero == 3) & (cases.each_microbatch > 0), 0.0, 2 * cases.sum_bytes)
    return (
        np.where(fused, factors["add_fused"], factors["add_share"])
        * (cases.precision + sums)
        * num_weights
        / _memory_bandwidth(cases, factors)
    )


def _data_parallel_seconds(cases: Cases, factors: FittedFactors, num_weights: PerCase) -> tuple[PerCase, PerCase]:
    """Return two durations of collectives per training step, for each run in `cases`: of reducing the gradients of
    `num_weights` weights over the data-parallel ranks, and of all-gathering updated weights (ZeRO 1 and 2, else 0).
    Overlap with computation is not subtracted.
    """
    all_ranks = dp_group(cases, factors, cases.dp)
    shard_group = dp_group(cases, factors, np.where(cases.zero < 3, cases.shard, 1.0))
    num_bytes = cases.reduce_bytes * num_weights
    reduce_s = np.where(
        cases.zero == 3, replica_group(cases, factors).all_reduce_seconds(num_bytes / cases.shard),
        np.where(
            (cases.zero > 0) & (cases.shard == cases.dp) & (cases.reduce_whole == 0),
            all_ranks.all_gather_seconds(num_bytes), all_ranks.all_reduce_seconds(num_bytes),
        ),
    )  # fmt: skip
    return reduce_s, np.where(
        (cases.zero > 0) & (cases.zero < 3), shard_group.all_gather_seconds(cases.precision * num_weights), 0.0
    )


def busy_share(time: StepTime) -> PerCase:
    """Return the share of a step's time in which a device computes, for each run."""
    return (time.compute - time.tp - time.sends + time.update) / time.total


def watts(time: StepTime, hardware: Hardware) -> PerCase:
    """Return the average power of one device during a step in watts, without host and cooling, for each run; 0 if the
    data sheet's power is unknown.
    """
    return hardware.power_W * (IDLE_POWER_SHARE + COMPUTE_POWER_SHARE * busy_share(time))


def dollars(seconds: float, gpus: int, dollars_per_gpu_hour: float) -> float:
    """Return the cost in dollars of `seconds` seconds on `gpus` devices."""
    return seconds / 3600 * gpus * dollars_per_gpu_hour
