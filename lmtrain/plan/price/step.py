"""Seconds and joules of a step: what one device computes, and what collectives, a pipeline and overlap make of it.

Computation is of one microbatch and one block, or the head: products by their shape, attention by its kernel, the rest
by its bytes. To it is added what is left bare of collectives (all-reduce, all-gather, reduce-scatter), messages and the
pipeline's bubble. Called by whoever prices layouts. Arrays have one entry a case; it knows no settings and no
schedule's table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtrain.plan.price.hardware import Factors, Hardware
from lmtrain.plan.price.workload import Attention, Column, Columns, Overlap, Pointwise, Schedule

SUSTAIN = ("sustain_volta", "sustain_ampere", "sustain_hopper", "sustain_blackwell", "sustain_ampere")
TILES = ((256, 128), (128, 128))
NORMS_PASSES, FLASH_BACKWARD = 11.0, 2.5
EAGER_ROTARY = 10.0  # two products, a turned copy of two halves, a sum: reads and writes of each number
RESTING = 0.80  # of the device's power, whatever it does within a step
COMPUTING = 0.18  # and so much more for the share of a step in which it computes


@dataclass(frozen=True)
class Work:
    """Seconds of a block's forward and backward by what they are spent on, and of the head's both ways."""

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
        """The backward's seconds without recompute."""
        return self.products_back + self.attention_back + self.pointwise_back


def price_work(c: Columns, f: Factors) -> Work:
    tokens = c.microbatch * c.seq_len
    heads, keys = c.num_heads * c.head_width / c.tp, c.num_kv_heads * c.head_width / c.tp
    up = c.ffn_width * (1 + c.gated) / c.tp
    shapes = ((heads + 2 * keys, c.width), (c.width, heads), (up, c.width), (c.width, c.ffn_width / c.tp))
    forward = sum((product(c, f, tokens, out, inner) for out, inner in shapes), np.zeros(len(c)))
    backward = sum((_backward(c, f, tokens, out, inner) for out, inner in shapes), np.zeros(len(c)))
    attention, attention_back = _attention(c, f, tokens)
    pointwise, pointwise_back = _pointwise(c, f, tokens, heads, keys)
    columns, scored = c.vocab / c.tp, tokens * c.scored_share
    head = product(c, f, scored, columns, c.width, whole=True) + _backward(c, f, scored, columns, c.width, whole=True)
    loss_bytes = f["loss_bytes"] * np.where(c.fused_loss > 0, f["loss_fused"], 1.0)
    loss = scored * np.where(c.whole_logits > 0, c.vocab, columns) * loss_bytes / _stream(c, f)
    return Work(forward, attention, pointwise, backward, attention_back, pointwise_back, head + loss)


def product(c: Columns, f: Factors, rows: Column, columns: Column, inner: Column, *, whole: bool = False) -> Column:
    """[rows, inner] x [inner, columns]. `whole`: in 16 bits, whatever the rest has."""
    low = np.where(whole, 0, c.low_precision)
    lower = f.by_kind(("sustain_low", "sustain_low", "sustain_low", "sustain_4bit", "sustain_low"), low)
    peak = np.where(low > 0, c.peak * lower * np.where(low == 4, f["sustain_row"], 1.0), c.half_peak)
    odd = (rows % 64 > 0) | (columns % 64 > 0) | (inner % 64 > 0)
    share = f.by_kind(SUSTAIN, c.generation) * c.sustained * np.where(odd, f["unaligned"], 1.0)
    short = 1 + f["side_ramp"] * (1 / rows + 1 / columns + 1 / inner)
    seconds = 2 * rows * columns * inner / (peak * share * _fill(c, f, rows, columns)) * short
    bytes_moved = c.precision * (rows * columns + rows * inner + columns * inner)
    cast = np.where(low > 0, f["cast_passes"] * (rows + columns) * inner, 0)
    return np.maximum(seconds, bytes_moved / _stream(c, f)) + cast / _stream(c, f) + f["gap_s"]


def _backward(c: Columns, f: Factors, rows: Column, columns: Column, inner: Column, *, whole: bool = False) -> Column:
    """Return the seconds of a product's backward: of the input and of the weight."""
    return product(c, f, rows, inner, columns, whole=whole) + product(c, f, columns, inner, rows, whole=whole)


def _fill(c: Columns, f: Factors, rows: Column, columns: Column) -> Column:
    """Return how full the device is: tiles are computed in waves, and the last wave may be nearly empty."""
    best = np.zeros(len(c))
    for height, breadth in TILES:
        num_tiles = np.ceil(rows / height) * np.ceil(columns / breadth)
        fill = (rows / height) * (columns / breadth) / (np.ceil(num_tiles / c.num_cores) * c.num_cores)
        best = np.maximum(best, fill ** f["fill_power"] * (1.0 if height == 256 else f["small_tile"]))
    return best


def _attention(c: Columns, f: Factors, tokens: Column) -> tuple[Column, Column]:
    seen = np.where(c.window > 0, np.minimum(c.window, c.seq_len), c.seq_len)
    flops = 4 * tokens * seen * c.num_heads * c.head_width / c.tp
    flash = c.attention >= Attention.FLASH1
    newer = np.where((c.attention == Attention.FLASH2) & (c.generation >= 2), f["flash2_newer"], 1.0)
    shares = f.by_kind(("scores_share", "scores_share", "flash1_share", "flash2_share", "cudnn_share"), c.attention)
    rate = c.half_peak * c.sustained * shares * newer * np.where(c.head_width % 8 > 0, f["odd_heads"], 1.0)
    causal = np.where(c.causal * flash > 0, 0.5 * (1 + 128 / c.seq_len), 1.0)
    narrow = np.where(c.attention == Attention.FLASH1, 0.0, f["head_ramp"] / c.head_width)
    ramp = np.where(flash, (1 + f["seq_ramp"] / c.seq_len) * (1 + narrow), 1.0)
    seconds = flops * causal * ramp / rate
    moved = np.where(c.attention == Attention.SCORES, f["scores_bytes"], f["fused_bytes"]) * c.precision / 2
    traffic = moved * (tokens * c.seq_len * c.num_heads / c.tp) / _stream(c, f)
    return (
        np.where(flash, seconds, seconds + 0.4 * traffic),
        np.where(flash, seconds * FLASH_BACKWARD, 2 * seconds + 0.6 * traffic),
    )


def _pointwise(c: Columns, f: Factors, tokens: Column, heads: Column, keys: Column) -> tuple[Column, Column]:
    """Return the traffic of elementwise work in numbers a token, forward and backward, for the kind of kernels."""
    along = np.where(c.sequence_parallel > 0, c.tp, 1.0)
    residual = NORMS_PASSES * c.width / along * np.where(c.parallel_block > 0, 0.6, 1.0)
    mlp = np.where(c.gated > 0, 3.0, 2.0) * c.ffn_width / c.tp
    turned = c.rotary * np.where((c.pointwise == Pointwise.EAGER) & (c.fused_rotary == 0), EAGER_ROTARY, 2.0)
    numbers = residual + mlp + (2 + turned) * (heads + keys)
    passes = f.by_kind(("passes_eager", "passes_fused", "passes_compiled"), c.pointwise)
    norms = c.eager_norm * 2 * f["norm_bytes"] * c.width / along
    at_once = 2 * tokens * c.precision * c.width / along  # is read and written
    missed = 1 - f["cached"] * np.minimum(c.cache / at_once, 1.0) ** 2
    seconds = tokens * c.precision * numbers * passes * missed / _stream(c, f)
    norm_s = tokens * norms * missed / _stream(c, f)
    kernels = np.where(c.pointwise == Pointwise.EAGER, 24, np.where(c.pointwise == Pointwise.FUSED, 10, 5)) * f["gap_s"]
    return seconds + 0.4 * norm_s + kernels, 1.6 * seconds + 0.6 * norm_s + 1.6 * kernels


def _stream(c: Columns, f: Factors) -> Column:
    return c.memory_Bps * f["stream_share"]


@dataclass(frozen=True)
class Group:
    """Ranks of one collective: how many, how many of them in a node, and the way between them."""

    size: Column
    local: Column
    bytes_per_s: Column  # through the ring's narrowest place
    latency_s: Column  # of one trip round
    tree_s: Column  # the same where sums go by trees

    def shared(self, num_bytes: Column) -> Column:
        """Return the seconds of an all-gather or a reduce-scatter; `num_bytes` is the whole tensor."""
        share = (self.size - 1) / np.maximum(self.size, 1)
        return np.where(self.size > 1, share * num_bytes / self.bytes_per_s + self.latency_s, 0.0)

    def reduced(self, num_bytes: Column) -> Column:
        """Return the seconds of an all-reduce: both halves of a ring."""
        share = (self.size - 1) / np.maximum(self.size, 1)
        return np.where(self.size > 1, 2 * (share * num_bytes / self.bytes_per_s + self.tree_s), 0.0)


def tp_group(c: Columns, f: Factors) -> Group:
    return _group(c, f, c.tp, np.ones(len(c)))


def dp_group(c: Columns, f: Factors, size: Column) -> Group:
    return _group(c, f, size, c.tp)


def copies_group(c: Columns, f: Factors) -> Group:
    """Ranks that hold the same shard."""
    return _group(c, f, np.maximum(c.dp / c.shard, 1.0), c.tp * c.shard)


def _group(c: Columns, f: Factors, size: Column, stride: Column) -> Group:
    local = _in_a_node(c, size, stride)
    link = c.link_Bps * f["link_share"]
    nic = c.nic_Bps * nic_share(c, f) * np.minimum(local * stride, c.node) / c.node / np.minimum(stride, c.node)
    nodes = np.ceil(size / local)
    inside = f["link_latency_s"] + 1e-6 * local
    between = nodes > 1
    # because: large groups change from rings to trees, whose depth is a logarithm
    ring = f["hop_latency_s"] * (nodes - 1) + f["step_latency_s"] * (size - nodes)
    tree = np.minimum(ring, 12 * f["hop_latency_s"] * np.log2(np.maximum(nodes, 2)))
    return Group(
        size, local, np.where(between, np.minimum(link, nic), link), inside + np.where(between, ring, 0.0),
        inside + np.where(between, tree, 0.0),
    )  # fmt: skip


def _in_a_node(c: Columns, size: Column, stride: Column) -> Column:
    """Return how many ranks of a group are in a node at least; a group across two nodes may have few in one.

    A run is spread evenly over as few nodes as it needs: 128 devices are 64 in each of two racks of 72. A group that is
    all of the run has all that a node holds: of 15 devices on nodes of 8 at least 7.
    """
    devices = c.pp * c.dp * c.tp
    filled = np.floor(devices / np.ceil(devices / c.node))
    span = np.rint(size * stride)
    together = np.where(span >= devices, filled, np.gcd(filled.astype(np.int64), span.astype(np.int64)))
    return np.clip(np.floor(together / stride), 1, size)


def nic_share(c: Columns, f: Factors) -> Column:
    return f.by_kind(("nic_share", "nic_share_other", "nic_share_omnipath"), c.network)


def send(c: Columns, f: Factors, num_bytes: Column) -> Column:
    """Return the seconds of a send over a pipeline boundary, all tp ranks at once, to the neighbour stage.

    A rank has two, before and behind it. Where several stages share a node, that of its first and last are one inside
    and one between nodes, and these set the pace.
    """
    stage = c.tp * c.dp
    outside = np.where(stage * c.pp <= c.node, 0.0, np.where(stage * 2 <= c.node, 0.5, 1.0))
    inside_s = num_bytes / (c.link_Bps * f["link_share"]) + f["link_latency_s"]
    between_s = num_bytes / (c.nic_Bps / c.node * nic_share(c, f)) + 2 * f["hop_latency_s"]
    return inside_s + outside * (between_s - inside_s)


def makespan(
    c: Columns, forward: Column, backward: Column, weight: Column, last: Column, largest: Column, weight_last: Column
) -> Column:
    """Seconds of all microbatches.

    `forward` and `backward` are of a stage before the last, on average (all its chunks), `weight` is the part of the
    backward that nobody waits for, `last` a microbatch's time in the last stage with the head, `largest` in the fullest
    of the others, and `weight_last` what nobody waits for in the last.

    Many microbatches keep the slowest stage busy but for the bubble; few take as long as the first one's passage, and
    what of each other one comes after it.
    """
    num, pp, vp, others = c.num_microbatches, c.pp, c.vp, c.pp - 1
    pace = np.maximum(last, largest)
    passage = others * (forward + backward) + last
    one = np.maximum(num * pace + (passage - pace) / vp, passage + (num - 1) * pace / vp)
    sooner = passage - others * weight  # with the halves that nobody waits for put off
    behind = np.where(last > largest, weight_last, weight)  # of the slowest stage
    h1 = np.maximum(
        num * pace + others * (forward + np.maximum(backward - weight - behind, 0.0)),
        sooner + (num - 1) * (pace - behind),
    )
    v = np.maximum(
        num * pace + others * np.maximum.reduce([forward, backward - weight, weight]) / 2,
        sooner + (num - 1) * (pace - forward),
    )
    halves = (c.schedule != Schedule.ONE_F_ONE_B) & (c.schedule != Schedule.GPIPE)
    return np.where(pp == 1, num * last, np.where(halves, np.where(c.schedule == Schedule.ZB_1, h1, v), one))


@dataclass(frozen=True)
class StepTime:
    """Seconds by where they go; `total` is a step."""

    compute: Column  # of all microbatches on the busiest rank
    tp: Column  # bare collectives of tensor parallelism, in it
    sends: Column  # waiting for messages of the pipeline, in it
    bubble: Column
    sharded: Column  # bare gathers and reductions of sharded weights
    reduce: Column  # gradients over dp, bare
    update: Column
    fixed: Column
    stragglers: Column

    @property
    def total(self) -> Column:
        return (
            self.compute + self.bubble + self.sharded + self.reduce + self.update + self.fixed + self.stragglers
        )


def stage_weights(c: Columns) -> tuple[Column, Column]:
    """Weights of one block and of the vocabulary's matrix, on one rank of tp."""
    heads, keys = c.num_heads * c.head_width, c.num_kv_heads * c.head_width
    block = c.width * (2 * heads + 2 * keys) + c.width * c.ffn_width * (2 + c.gated)
    return block / c.tp, c.vocab * c.width / c.tp


@dataclass(frozen=True)
class Microbatch:
    """Seconds of one microbatch: in a block, and what a rank and the last stage have besides."""

    forward: Column
    backward: Column
    weight: Column  # of the backward: the part that no other stage waits for
    tp: Column  # bare collectives of tensor parallelism, in both ways
    gather: Column  # sharded weights of a block
    reduce: Column  # and its gradients
    head: Column  # of the last stage, both ways
    sends: Column  # that a rank waits for messages, both ways


def price_microbatch(c: Columns, f: Factors) -> Microbatch:
    work = price_work(c, f)
    block, table = stage_weights(c)
    tokens = c.microbatch * c.seq_len
    # tensor parallelism: two collectives of a block forward, two backward, those of what is done again
    one = tp_group(c, f).reduced(tokens * c.width * c.precision)
    bare = f.by_kind(("tp_exposed_none", "tp_exposed_weights", "tp_exposed_chunked"), c.tp_overlap)
    tp_forward = 2 * one * np.where(c.tp_overlap == Overlap.CHUNKED, f["tp_exposed_chunked"], 1.0)
    tp_back = 2 * one * bare + c.again_collectives * tp_forward
    again = c.again_products * work.products + c.again_attention * work.attention + c.again_pointwise * work.pointwise
    # sharded weights: gathered for forward and backward, gradients reduced, each microbatch
    group = dp_group(c, f, np.where(c.zero == 3, c.shard, 1.0))
    logits = np.where(c.whole_logits > 0, tp_group(c, f).shared(tokens * c.scored_share * c.vocab * c.precision), 0.0)
    boundary = tokens * c.width * c.precision / np.where(c.whole_messages > 0, 1.0, c.tp)
    waits = np.where(c.send_overlap > 0, f["send_overlapped"], f["send_exposed"])
    return Microbatch(
        forward=work.forward + tp_forward, backward=work.backward + again + tp_back + _add_seconds(c, f, block),
        weight=work.products_back / 2, tp=tp_forward + tp_back,
        gather=group.shared(c.precision * block), reduce=group.shared(c.reduce_bytes * block),
        head=work.head + logits + _add_seconds(c, f, table) + one * np.where(c.tp > 1, 1.0, 0),
        sends=np.where(c.pp > 1, 2 * waits * c.vp * send(c, f, boundary), 0.0),
    )  # fmt: skip


def price_step(c: Columns, f: Factors, replayed: Column | None = None) -> StepTime:
    """`replayed`: seconds of all microbatches, where a table was replayed; else they are worked out."""
    one = price_microbatch(c, f)
    block, table = stage_weights(c)
    layers = c.largest_stage
    hidden_forward = np.minimum(one.gather, one.forward)
    behind = one.gather * c.regather + one.reduce
    hidden_back = np.minimum(behind, one.backward)
    sharded_block = (
        (one.gather - hidden_forward) + (behind - hidden_back)
        + f["fsdp_exposed"] * (hidden_forward + hidden_back) + f["contention"] * (hidden_forward + hidden_back)
    )  # fmt: skip
    group = dp_group(c, f, np.where(c.zero == 3, c.shard, 1.0))
    sharded_table = 2 * group.shared(c.precision * table) + group.shared(c.reduce_bytes * table)
    sharded_s = np.where(c.each_microbatch > 0, c.num_microbatches, 1.0) * (layers * sharded_block + sharded_table)
    # the pipeline
    # of all stages but the last; because: of several a rank, the longest hold up the others in turn
    mean = np.where((c.pp > 1) & (c.vp == 1), (c.num_layers - c.last_stage) / np.maximum(c.pp - 1, 1), layers)
    forward, backward = mean * one.forward + one.sends / 2, mean * one.backward + one.sends / 2
    fullest = layers * (one.forward + one.backward) + one.sends
    last = c.last_stage * (one.forward + one.backward) + one.head + one.sends
    weight_last = c.last_stage * one.weight + one.head / 3
    whole = (
        makespan(c, forward, backward, mean * one.weight, last, fullest, weight_last) if replayed is None else replayed
    )
    busy = c.num_microbatches * np.maximum(last, np.where(c.pp > 1, fullest, 0.0))
    # gradients and weights over dp, once a step
    held = layers * block + table
    reduce_s, gather_s = _over_dp(c, f, held)
    hidden = np.minimum(reduce_s, np.where(c.pp > 1, 0.5, 1.0) * layers * one.backward)
    reduce_bare = np.where((c.zero == 2) & (c.reduce_each > 0), c.num_microbatches, 1.0) * np.where(
        c.reduce_overlap > 0, (reduce_s - hidden) + (f["dp_exposed"] + f["contention"]) * hidden, reduce_s
    )
    gather_bare = np.where(c.gather_overlap > 0, f["dp_exposed"] * gather_s, gather_s)
    owned = held / np.where(c.zero > 0, c.shard, 1.0)
    update_s = owned * f["update_bytes"] * np.where(c.fused_optimizer > 0, 1.0, f["update_eager"]) / _stream(c, f)
    base = whole + sharded_s + reduce_bare + gather_bare + update_s
    late = base * f["straggler"] * np.sqrt(2 * np.log(np.maximum(c.pp * c.dp * c.tp / 4, 1.0)))
    return StepTime(
        compute=busy, tp=c.num_microbatches * layers * one.tp,
        sends=c.num_microbatches * one.sends, bubble=np.maximum(whole - busy, 0.0),
        sharded=sharded_s, reduce=reduce_bare + gather_bare, update=update_s,
        fixed=np.full(len(c), f["step_s"]), stragglers=late,
    )  # fmt: skip


def _add_seconds(c: Columns, f: Factors, weights: Column) -> Column:
    """Return the seconds in which a micro-batch's gradients are written, read and added to the sum.

    Gradients have the precision of what computes; their sum has bytes of its own, four in our runs.
    """
    sent = ((c.zero == 2) & (c.reduce_each > 0)) | ((c.zero == 3) & (c.each_microbatch > 0))  # and none is added up
    fused = (c.fused_gradients > 0) & (c.num_microbatches >= c.fused_gradients) & ~sent
    sums = np.where((c.zero == 3) & (c.each_microbatch > 0), 0.0, 2 * c.sum_bytes)
    return np.where(fused, f["add_fused"], f["add_share"]) * (c.precision + sums) * weights / _stream(c, f)


def _over_dp(c: Columns, f: Factors, held: Column) -> tuple[Column, Column]:
    """Seconds of gradients' reduce-scatter or all-reduce and of weights' all-gather by themselves, once a step."""
    whole = dp_group(c, f, c.dp)
    shard = dp_group(c, f, np.where(c.zero < 3, c.shard, 1.0))
    summed = c.reduce_bytes * held
    reduce_s = np.where(
        c.zero == 3, copies_group(c, f).reduced(summed / c.shard),
        np.where((c.zero > 0) & (c.shard == c.dp) & (c.reduce_whole == 0), whole.shared(summed), whole.reduced(summed)),
    )  # fmt: skip
    return reduce_s, np.where((c.zero > 0) & (c.zero < 3), shard.shared(c.precision * held), 0.0)


def busy_share(time: StepTime) -> Column:
    return (time.compute - time.tp - time.sends + time.update) / time.total


def watts(time: StepTime, hardware: Hardware) -> Column:
    """Return the watts of one device, without host and cooling; 0 if the device's power is not known."""
    return hardware.power_W * (RESTING + COMPUTING * busy_share(time))


def dollars(seconds: float, gpus: int, price: float) -> float:
    """`price` of a device for an hour."""
    return seconds / 3600 * gpus * price
