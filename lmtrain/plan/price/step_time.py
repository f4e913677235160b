"""Seconds and joules of a training step: computation on a device, collectives, the pipeline and their overlap.

Computation is priced per micro-batch and block, and for the head: matrix products by shape, attention by kernel, other
operations by memory traffic. Exposed collectives (all-reduce, all-gather, reduce-scatter), messages and the pipeline
bubble are added. Called by code that prices layouts. Arrays have an entry per case. This module does not depend on
settings or on schedule tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtrain.plan.price.hardware import Factors, Hardware
from lmtrain.plan.price.workload import Attention, Column, Columns, Overlap, Pointwise, Schedule

SUSTAIN_FACTORS = ("sustain_volta", "sustain_ampere", "sustain_hopper", "sustain_blackwell", "sustain_ampere")
TILE_SIZES = ((256, 128), (128, 128))
NORM_PASSES, FLASH_BACKWARD = 11.0, 2.5
EAGER_ROTARY = 10.0  # reads and writes per number: two products, a rotated copy of two halves, a sum
IDLE_POWER_SHARE = 0.80  # share of the device's power that it draws all through a step
COMPUTE_POWER_SHARE = 0.18  # further share of its power, times the share of the step in which it computes


@dataclass(frozen=True)
class Work:
    """Seconds of a block's forward and backward by kind of work, and of the head in both directions."""

    products: Column
    attention: Column
    pointwise: Column
    products_back: Column
    attention_back: Column
    pointwise_back: Column
    head: Column

    @property
    def forward(self) -> Column:
        return self.products + self.attention + self.pointwise

    @property
    def backward(self) -> Column:
        """Seconds of the backward, without recompute."""
        return self.products_back + self.attention_back + self.pointwise_back


def price_work(c: Columns, f: Factors) -> Work:
    """Return the seconds of each kind of work in a block and in the head, for one micro-batch on one tp rank."""
    tokens = c.microbatch * c.seq_len
    heads, keys = c.num_heads * c.head_width / c.tp, c.num_kv_heads * c.head_width / c.tp
    up = c.ffn_width * (1 + c.gated) / c.tp
    shapes = ((heads + 2 * keys, c.width), (c.width, heads), (up, c.width), (c.width, c.ffn_width / c.tp))
    forward = sum((product_seconds(c, f, tokens, out, inner) for out, inner in shapes), np.zeros(len(c)))
    backward = sum((_backward_seconds(c, f, tokens, out, inner) for out, inner in shapes), np.zeros(len(c)))
    attention, attention_back = _attention_seconds(c, f, tokens)
    pointwise, pointwise_back = _pointwise_seconds(c, f, tokens, heads, keys)
    columns, scored = c.vocab / c.tp, tokens * c.scored_share
    head = product_seconds(c, f, scored, columns, c.width, in_16_bits=True) + _backward_seconds(
        c, f, scored, columns, c.width, in_16_bits=True
    )
    loss_bytes = f["loss_bytes"] * np.where(c.fused_loss > 0, f["loss_fused"], 1.0)
    loss = scored * np.where(c.whole_logits > 0, c.vocab, columns) * loss_bytes / _memory_bandwidth(c, f)
    return Work(forward, attention, pointwise, backward, attention_back, pointwise_back, head + loss)


def product_seconds(
    c: Columns, f: Factors, rows: Column, columns: Column, inner: Column, *, in_16_bits: bool = False
) -> Column:
    """Return seconds of the matrix product [rows, inner] x [inner, columns].

    `in_16_bits`: even if the case computes other products in fewer bits.
    """
    low_kind = np.where(in_16_bits, 0, c.low_precision)
    low_speed = f.by_index(("sustain_low", "sustain_low", "sustain_low", "sustain_4bit", "sustain_low"), low_kind)
    peak = np.where(low_kind > 0, c.peak * low_speed * np.where(low_kind == 4, f["sustain_row"], 1.0), c.half_peak)
    is_unaligned = (rows % 64 > 0) | (columns % 64 > 0) | (inner % 64 > 0)
    reached_share = (
        f.by_index(SUSTAIN_FACTORS, c.generation) * c.sustained * np.where(is_unaligned, f["unaligned"], 1.0)
    )
    ramp = 1 + f["side_ramp"] * (1 / rows + 1 / columns + 1 / inner)
    seconds = 2 * rows * columns * inner / (peak * reached_share * _fill_share(c, f, rows, columns)) * ramp
    bytes_moved = c.precision * (rows * columns + rows * inner + columns * inner)
    cast = np.where(low_kind > 0, f["cast_passes"] * (rows + columns) * inner, 0)
    return np.maximum(seconds, bytes_moved / _memory_bandwidth(c, f)) + cast / _memory_bandwidth(c, f) + f["gap_s"]


def _backward_seconds(
    c: Columns, f: Factors, rows: Column, columns: Column, inner: Column, *, in_16_bits: bool = False
) -> Column:
    """Return seconds of the two backward products: the gradients of the input and of the weight."""
    return product_seconds(c, f, rows, inner, columns, in_16_bits=in_16_bits) + product_seconds(
        c, f, columns, inner, rows, in_16_bits=in_16_bits
    )


def _fill_share(c: Columns, f: Factors, rows: Column, columns: Column) -> Column:
    """Return how full the device is, in (0, 1]: tiles run in waves, and the last wave may be nearly empty."""
    best = np.zeros(len(c))
    for height, breadth in TILE_SIZES:
        num_tiles = np.ceil(rows / height) * np.ceil(columns / breadth)
        fill = (rows / height) * (columns / breadth) / (np.ceil(num_tiles / c.num_cores) * c.num_cores)
        best = np.maximum(best, fill ** f["fill_power"] * (1.0 if height == 256 else f["small_tile"]))
    return best


def _attention_seconds(c: Columns, f: Factors, tokens: Column) -> tuple[Column, Column]:
    """Return forward and backward seconds of attention between queries and keys, without its projections."""
    visible = np.where(c.window > 0, np.minimum(c.window, c.seq_len), c.seq_len)
    flops = 4 * tokens * visible * c.num_heads * c.head_width / c.tp
    flash = c.attention >= Attention.FLASH1
    newer = np.where((c.attention == Attention.FLASH2) & (c.generation >= 2), f["flash2_newer"], 1.0)
    shares = f.by_index(("scores_share", "scores_share", "flash1_share", "flash2_share", "cudnn_share"), c.attention)
    rate = c.half_peak * c.sustained * shares * newer * np.where(c.head_width % 8 > 0, f["odd_heads"], 1.0)
    causal = np.where(c.causal * flash > 0, 0.5 * (1 + 128 / c.seq_len), 1.0)
    narrow = np.where(c.attention == Attention.FLASH1, 0.0, f["head_ramp"] / c.head_width)
    ramp = np.where(flash, (1 + f["seq_ramp"] / c.seq_len) * (1 + narrow), 1.0)
    seconds = flops * causal * ramp / rate
    bytes_per_score = np.where(c.attention == Attention.SCORES, f["scores_bytes"], f["fused_bytes"]) * c.precision / 2
    traffic = bytes_per_score * (tokens * c.seq_len * c.num_heads / c.tp) / _memory_bandwidth(c, f)
    return (
        np.where(flash, seconds, seconds + 0.4 * traffic),
        np.where(flash, seconds * FLASH_BACKWARD, 2 * seconds + 0.6 * traffic),
    )


def _pointwise_seconds(c: Columns, f: Factors, tokens: Column, heads: Column, keys: Column) -> tuple[Column, Column]:
    """Return forward and backward seconds of pointwise work: the minimal traffic, scaled for the kind of kernels."""
    seq_shards = np.where(c.sequence_parallel > 0, c.tp, 1.0)
    residual = NORM_PASSES * c.width / seq_shards * np.where(c.parallel_block > 0, 0.6, 1.0)
    mlp = np.where(c.gated > 0, 3.0, 2.0) * c.ffn_width / c.tp
    rotary_passes = c.rotary * np.where((c.pointwise == Pointwise.EAGER) & (c.fused_rotary == 0), EAGER_ROTARY, 2.0)
    numbers = residual + mlp + (2 + rotary_passes) * (heads + keys)
    passes = f.by_index(("passes_eager", "passes_fused", "passes_compiled"), c.pointwise)
    norms = c.eager_norm * 2 * f["norm_bytes"] * c.width / seq_shards
    at_once = 2 * tokens * c.precision * c.width / seq_shards  # bytes that a pass reads and writes
    missed = 1 - f["cached"] * np.minimum(c.cache / at_once, 1.0) ** 2
    seconds = tokens * c.precision * numbers * passes * missed / _memory_bandwidth(c, f)
    norm_s = tokens * norms * missed / _memory_bandwidth(c, f)
    kernels = np.where(c.pointwise == Pointwise.EAGER, 24, np.where(c.pointwise == Pointwise.FUSED, 10, 5)) * f["gap_s"]
    return seconds + 0.4 * norm_s + kernels, 1.6 * seconds + 0.6 * norm_s + 1.6 * kernels


def _memory_bandwidth(c: Columns, f: Factors) -> Column:
    """Return the bytes per second that a streaming kernel reads and writes."""
    return c.memory_Bps * f["stream_share"]


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: how many, how many of them per node, and the links between them."""

    num_ranks: Column
    num_in_node: Column
    bytes_per_s: Column  # bandwidth of the ring's slowest link
    latency_s: Column  # of a trip around the ring
    tree_s: Column  # of an all-reduce, which may use a tree instead of the ring

    def all_gather_seconds(self, num_bytes: Column) -> Column:
        """Return seconds of an all-gather or of a reduce-scatter; `num_bytes` is the whole tensor, in equal shards."""
        sent_share = (self.num_ranks - 1) / np.maximum(self.num_ranks, 1)
        return np.where(self.num_ranks > 1, sent_share * num_bytes / self.bytes_per_s + self.latency_s, 0.0)

    def all_reduce_seconds(self, num_bytes: Column) -> Column:
        """Return seconds of an all-reduce, which costs as much as a reduce-scatter and an all-gather."""
        sent_share = (self.num_ranks - 1) / np.maximum(self.num_ranks, 1)
        return np.where(self.num_ranks > 1, 2 * (sent_share * num_bytes / self.bytes_per_s + self.tree_s), 0.0)


def tp_group(c: Columns, f: Factors) -> Group:
    """Return the tensor-parallel group of a rank."""
    return _group(c, f, c.tp, np.ones(len(c)))


def dp_group(c: Columns, f: Factors, size: Column) -> Group:
    """Return a group of `size` data-parallel ranks, whose neighbours are tp ranks apart."""
    return _group(c, f, size, c.tp)


def replica_group(c: Columns, f: Factors) -> Group:
    """Return the group of ranks that hold the same shard (the data-parallel replicas)."""
    return _group(c, f, np.maximum(c.dp / c.shard, 1.0), c.tp * c.shard)


def _group(c: Columns, f: Factors, size: Column, stride: Column) -> Group:
    """Return a group of `size` ranks that are `stride` ranks apart."""
    local = _ranks_per_node(c, size, stride)
    link = c.link_Bps * f["link_share"]
    nic = c.nic_Bps * nic_share(c, f) * np.minimum(local * stride, c.node) / c.node / np.minimum(stride, c.node)
    nodes = np.ceil(size / local)
    inside_s = f["link_latency_s"] + 1e-6 * local
    between = nodes > 1
    # because: NCCL switches large groups from rings to trees, whose depth grows with the logarithm of their size
    ring = f["hop_latency_s"] * (nodes - 1) + f["step_latency_s"] * (size - nodes)
    tree = np.minimum(ring, 12 * f["hop_latency_s"] * np.log2(np.maximum(nodes, 2)))
    return Group(
        size, local, np.where(between, np.minimum(link, nic), link), inside_s + np.where(between, ring, 0.0),
        inside_s + np.where(between, tree, 0.0),
    )  # fmt: skip


def _ranks_per_node(c: Columns, size: Column, stride: Column) -> Column:
    """Return how many ranks of a group share a node, at the least.

    A group that lies across two nodes may have few of its ranks in one of them. A run is spread evenly over as few
    nodes as possible: 128 devices are 64 in each of two racks of 72. A group that spans the whole run has all the
    devices of a node: of 15 devices on nodes of 8, at least 7.
    """
    devices = c.pp * c.dp * c.tp
    per_node = np.floor(devices / np.ceil(devices / c.node))
    span = np.rint(size * stride)
    same_node = np.where(span >= devices, per_node, np.gcd(per_node.astype(np.int64), span.astype(np.int64)))
    return np.clip(np.floor(same_node / stride), 1, size)


def nic_share(c: Columns, f: Factors) -> Column:
    """Return the share of the network adapters' bandwidth that collectives reach, by kind of network."""
    return f.by_index(("nic_share", "nic_share_other", "nic_share_omnipath"), c.network)


def send_seconds(c: Columns, f: Factors, num_bytes: Column) -> Column:
    """Return seconds of a message to the neighbour stage, with all tp ranks sending at once.

    A rank has two neighbours. If several stages share a node, the first and last stage of the node have a boundary
    inside the node and another between nodes, and these stages set the pace.
    """
    stage = c.tp * c.dp
    outside = np.where(stage * c.pp <= c.node, 0.0, np.where(stage * 2 <= c.node, 0.5, 1.0))
    inside_s = num_bytes / (c.link_Bps * f["link_share"]) + f["link_latency_s"]
    between_s = num_bytes / (c.nic_Bps / c.node * nic_share(c, f)) + 2 * f["hop_latency_s"]
    return inside_s + outside * (between_s - inside_s)


def makespan(
    c: Columns, forward: Column, backward: Column, weight: Column, last: Column, largest: Column, weight_last: Column
) -> Column:
    """Return seconds of the pipeline for all micro-batches of a step, by closed form.

    `forward` and `backward` are a micro-batch's seconds in a stage other than the last, averaged over stages, with all
    chunks of the stage. `weight` is the part of `backward` that no other stage waits for. `last` is a micro-batch's
    time in the last stage with the head, `largest` in the fullest other stage. `weight_last` is the part of the last
    stage's backward that no other stage waits for.

    With many micro-batches, the slowest stage is always busy except for the bubble. With few, the step takes the
    passage of the first micro-batch plus the part of every other micro-batch that follows it.
    """
    num, pp, vp, num_others = c.num_microbatches, c.pp, c.vp, c.pp - 1
    pace = np.maximum(last, largest)
    passage = num_others * (forward + backward) + last
    one_f_one_b = np.maximum(num * pace + (passage - pace) / vp, passage + (num - 1) * pace / vp)
    early_passage = passage - num_others * weight  # the passage if the weight halves are deferred
    deferred = np.where(last > largest, weight_last, weight)  # deferred seconds of the slowest stage
    zb_h1 = np.maximum(
        num * pace + num_others * (forward + np.maximum(backward - weight - deferred, 0.0)),
        early_passage + (num - 1) * (pace - deferred),
    )
    zb_v = np.maximum(
        num * pace + num_others * np.maximum.reduce([forward, backward - weight, weight]) / 2,
        early_passage + (num - 1) * (pace - forward),
    )
    halves = (c.schedule != Schedule.ONE_F_ONE_B) & (c.schedule != Schedule.GPIPE)
    return np.where(
        pp == 1, num * last, np.where(halves, np.where(c.schedule == Schedule.ZB_1, zb_h1, zb_v), one_f_one_b)
    )


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause; `total` is the whole step."""

    compute: Column  # of all microbatches on the busiest rank
    tp: Column  # exposed collectives of tensor parallelism, included in `compute`
    sends: Column  # waiting for pipeline messages, included in `compute`
    bubble: Column
    sharded: Column  # exposed gathers and reductions of sharded weights (zero 3)
    reduce: Column  # exposed gradient reduction over dp
    update: Column
    fixed: Column
    stragglers: Column

    @property
    def total(self) -> Column:
        return (
            self.compute + self.bubble + self.sharded + self.reduce + self.update + self.fixed + self.stragglers
        )


def stage_weights(c: Columns) -> tuple[Column, Column]:
    """Return the number of weights in a block and in the vocabulary matrix, on one tp rank."""
    heads, keys = c.num_heads * c.head_width, c.num_kv_heads * c.head_width
    block = c.width * (2 * heads + 2 * keys) + c.width * c.ffn_width * (2 + c.gated)
    return block / c.tp, c.vocab * c.width / c.tp


@dataclass(frozen=True)
class Microbatch:
    """Seconds of a micro-batch in one block, and the extra seconds of a rank and of the last stage."""

    forward: Column
    backward: Column
    weight: Column  # part of `backward` that no other stage waits for
    tp: Column  # exposed collectives of tensor parallelism, forward and backward
    gather: Column  # all-gather of a block's sharded weights
    reduce: Column  # reduce-scatter of a block's gradients
    head: Column  # in the last stage, forward and backward
    sends: Column  # a rank's waiting for messages, forward and backward


def price_microbatch(c: Columns, f: Factors) -> Microbatch:
    """Return the seconds of a micro-batch for each case, with the recompute and the exposed tp collectives."""
    work = price_work(c, f)
    block, table = stage_weights(c)
    tokens = c.microbatch * c.seq_len
    # tensor parallelism: per block two collectives forward, two backward, and those of recompute
    all_reduce = tp_group(c, f).all_reduce_seconds(tokens * c.width * c.precision)
    exposed = f.by_index(("tp_exposed_none", "tp_exposed_weights", "tp_exposed_chunked"), c.tp_overlap)
    tp_forward = 2 * all_reduce * np.where(c.tp_overlap == Overlap.CHUNKED, f["tp_exposed_chunked"], 1.0)
    tp_backward = 2 * all_reduce * exposed + c.recomputed_collectives * tp_forward
    recompute = (
        c.recomputed_products * work.products
        + c.recomputed_attention * work.attention
        + c.recomputed_pointwise * work.pointwise
    )
    # sharded weights: in each micro-batch, gathered for forward and backward, and their gradients reduced
    shard_group = dp_group(c, f, np.where(c.zero == 3, c.shard, 1.0))
    logits = np.where(
        c.whole_logits > 0, tp_group(c, f).all_gather_seconds(tokens * c.scored_share * c.vocab * c.precision), 0.0
    )
    boundary = tokens * c.width * c.precision / np.where(c.whole_messages > 0, 1.0, c.tp)
    exposed_sends = np.where(c.send_overlap > 0, f["send_overlapped"], f["send_exposed"])
    return Microbatch(
        forward=work.forward + tp_forward,
        backward=work.backward + recompute + tp_backward + _accumulate_seconds(c, f, block),
        weight=work.products_back / 2, tp=tp_forward + tp_backward,
        gather=shard_group.all_gather_seconds(c.precision * block),
        reduce=shard_group.all_gather_seconds(c.reduce_bytes * block),
        head=work.head + logits + _accumulate_seconds(c, f, table) + all_reduce * np.where(c.tp > 1, 1.0, 0),
        sends=np.where(c.pp > 1, 2 * exposed_sends * c.vp * send_seconds(c, f, boundary), 0.0),
    )  # fmt: skip


def price_step(c: Columns, f: Factors, replayed: Column | None = None) -> StepTime:
    """Return the seconds of each step by cause.

    `replayed` has the pipeline seconds of all micro-batches from a replayed schedule table; None: by closed form.
    """
    micro = price_microbatch(c, f)
    block, table = stage_weights(c)
    layers = c.largest_stage
    hidden_forward = np.minimum(micro.gather, micro.forward)
    backward_collectives = micro.gather * c.regather + micro.reduce
    hidden_back = np.minimum(backward_collectives, micro.backward)
    sharded_block = (
        (micro.gather - hidden_forward) + (backward_collectives - hidden_back)
        + f["fsdp_exposed"] * (hidden_forward + hidden_back) + f["contention"] * (hidden_forward + hidden_back)
    )  # fmt: skip
    shard_group = dp_group(c, f, np.where(c.zero == 3, c.shard, 1.0))
    sharded_table = 2 * shard_group.all_gather_seconds(c.precision * table) + shard_group.all_gather_seconds(
        c.reduce_bytes * table
    )
    sharded_s = np.where(c.each_microbatch > 0, c.num_microbatches, 1.0) * (layers * sharded_block + sharded_table)
    # the pipeline
    # mean over all stages but the last; because: with several chunks per rank, the longest delay all others in turn
    mean_layers = np.where((c.pp > 1) & (c.vp == 1), (c.num_layers - c.last_stage) / np.maximum(c.pp - 1, 1), layers)
    forward, backward = mean_layers * micro.forward + micro.sends / 2, mean_layers * micro.backward + micro.sends / 2
    fullest = layers * (micro.forward + micro.backward) + micro.sends
    last = c.last_stage * (micro.forward + micro.backward) + micro.head + micro.sends
    weight_last = c.last_stage * micro.weight + micro.head / 3
    pipeline_s = (
        makespan(c, forward, backward, mean_layers * micro.weight, last, fullest, weight_last)
        if replayed is None
        else replayed
    )
    busy = c.num_microbatches * np.maximum(last, np.where(c.pp > 1, fullest, 0.0))
    # gradients and weights over dp, once a step
    num_weights = layers * block + table
    reduce_s, gather_s = _data_parallel_seconds(c, f, num_weights)
    hidden_reduce = np.minimum(reduce_s, np.where(c.pp > 1, 0.5, 1.0) * layers * micro.backward)
    reduce_exposed = np.where((c.zero == 2) & (c.reduce_each > 0), c.num_microbatches, 1.0) * np.where(
        c.reduce_overlap > 0, (reduce_s - hidden_reduce) + (f["dp_exposed"] + f["contention"]) * hidden_reduce, reduce_s
    )
    gather_exposed = np.where(c.gather_overlap > 0, f["dp_exposed"] * gather_s, gather_s)
    updated_weights = num_weights / np.where(c.zero > 0, c.shard, 1.0)
    update_s = (
        updated_weights
        * f["update_bytes"]
        * np.where(c.fused_optimizer > 0, 1.0, f["update_eager"])
        / _memory_bandwidth(c, f)
    )
    base = pipeline_s + sharded_s + reduce_exposed + gather_exposed + update_s
    straggler_s = base * f["straggler"] * np.sqrt(2 * np.log(np.maximum(c.pp * c.dp * c.tp / 4, 1.0)))
    return StepTime(
        compute=busy, tp=c.num_microbatches * layers * micro.tp,
        sends=c.num_microbatches * micro.sends, bubble=np.maximum(pipeline_s - busy, 0.0),
        sharded=sharded_s, reduce=reduce_exposed + gather_exposed, update=update_s,
        fixed=np.full(len(c), f["step_s"]), stragglers=straggler_s,
    )  # fmt: skip


def _accumulate_seconds(c: Columns, f: Factors, num_weights: Column) -> Column:
    """Return seconds per micro-batch to accumulate gradients of `num_weights` weights: write, read and add.

    Gradients have the compute precision; their sum has its own number of bytes, four in our runs. A shard's sum is
    short, and its traffic is neglected.
    """
    has_no_sum = ((c.zero == 2) & (c.reduce_each > 0)) | ((c.zero == 3) & (c.each_microbatch > 0))  # without a sum
    fused = (c.fused_gradients > 0) & (c.num_microbatches >= c.fused_gradients) & ~has_no_sum
    sums = np.where((c.zero == 3) & (c.each_microbatch > 0), 0.0, 2 * c.sum_bytes)
    return (
        np.where(fused, f["add_fused"], f["add_share"]) * (c.precision + sums) * num_weights / _memory_bandwidth(c, f)
    )


def _data_parallel_seconds(c: Columns, f: Factors, num_weights: Column) -> tuple[Column, Column]:
    """Return seconds per step, without overlap, of reducing gradients over dp and of all-gathering weights."""
    all_ranks = dp_group(c, f, c.dp)
    shard_group = dp_group(c, f, np.where(c.zero < 3, c.shard, 1.0))
    num_bytes = c.reduce_bytes * num_weights
    reduce_s = np.where(
        c.zero == 3, replica_group(c, f).all_reduce_seconds(num_bytes / c.shard),
        np.where(
            (c.zero > 0) & (c.shard == c.dp) & (c.reduce_whole == 0),
            all_ranks.all_gather_seconds(num_bytes), all_ranks.all_reduce_seconds(num_bytes),
        ),
    )  # fmt: skip
    return reduce_s, np.where(
        (c.zero > 0) & (c.zero < 3), shard_group.all_gather_seconds(c.precision * num_weights), 0.0
    )


def busy_share(time: StepTime) -> Column:
    """Return the share of a step in which a device computes."""
    return (time.compute - time.tp - time.sends + time.update) / time.total


def watts(time: StepTime, hardware: Hardware) -> Column:
    """Return the power of a device, without its host and cooling; 0 if the device's power is unknown."""
    return hardware.power_W * (IDLE_POWER_SHARE + COMPUTE_POWER_SHARE * busy_share(time))


def dollars(seconds: float, gpus: int, dollars_per_gpu_hour: float) -> float:
    """Return the cost of a run of `seconds` on `gpus` devices."""
    return seconds / 3600 * gpus * dollars_per_gpu_hour
