"""Seconds of a step: what hides behind what.

Takes a block's computation (work), what its collectives take by themselves (communicate) and how long the pipeline
takes (its closed form, or a replay), and adds what is left bare. Arrays have one entry a case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtrain.plan.price.communicate import copies_group, dp_group, send, tp_group
from lmtrain.plan.price.factors import Factors
from lmtrain.plan.price.pipeline import makespan
from lmtrain.plan.price.work import price_work
from lmtrain.plan.price.workload import Column, Columns, Overlap


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
        parts = self.compute + self.bubble + self.sharded + self.reduce + self.update + self.fixed
        return parts + self.stragglers


def stage_weights(c: Columns, *, fullest: bool = True) -> tuple[Column, Column]:
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
    bare_forward = np.where(c.tp_overlap == Overlap.CHUNKED, f["tp_exposed_chunked"], 1.0)
    tp_forward = 2 * one * bare_forward
    tp_back = 2 * one * bare + c.again_collectives * tp_forward
    again = c.again_products * work.products + c.again_attention * work.attention + c.again_pointwise * work.pointwise
    add = _add_seconds(c, f, block)
    # sharded weights: gathered for forward and backward, gradients reduced, each microbatch
    group = dp_group(c, f, np.where(c.zero == 3, c.shard, 1.0))
    logits = np.where(c.whole_logits > 0, tp_group(c, f).shared(tokens * c.scored_share * c.vocab * c.precision), 0.0)
    boundary = tokens * c.width * c.precision / np.where(c.whole_messages > 0, 1.0, c.tp)
    waits = np.where(c.send_overlap > 0, f["send_overlapped"], f["send_exposed"])
    return Microbatch(
        forward=work.forward + tp_forward, backward=work.backward + again + tp_back + add,
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
    whole = replayed
    if whole is None:
        weight_last = c.last_stage * one.weight + one.head / 3
        whole = makespan(c, forward, backward, mean * one.weight, last, fullest, weight_last)
    busy = c.num_microbatches * np.maximum(last, np.where(c.pp > 1, fullest, 0.0))
    # gradients and weights over dp, once a step
    held = layers * block + table
    reduce_s, gather_s = _over_dp(c, f, held)
    window = np.where(c.pp > 1, 0.5, 1.0) * layers * one.backward
    hidden = np.minimum(reduce_s, window)
    times = np.where((c.zero == 2) & (c.reduce_each > 0), c.num_microbatches, 1.0)
    reduce_bare = times * np.where(
        c.reduce_overlap > 0, (reduce_s - hidden) + (f["dp_exposed"] + f["contention"]) * hidden, reduce_s
    )
    gather_bare = np.where(c.gather_overlap > 0, f["dp_exposed"] * gather_s, gather_s)
    owned = held / np.where(c.zero > 0, c.shard, 1.0)
    update = owned * f["update_bytes"] * np.where(c.fused_optimizer > 0, 1.0, f["update_eager"])
    update_s = update / (c.memory_Bps * f["stream_share"])
    base = whole + sharded_s + reduce_bare + gather_bare + update_s
    devices = c.pp * c.dp * c.tp
    late = base * f["straggler"] * np.sqrt(2 * np.log(np.maximum(devices / 4, 1.0)))
    return StepTime(
        compute=busy, tp=c.num_microbatches * layers * one.tp,
        sends=c.num_microbatches * one.sends, bubble=np.maximum(whole - busy, 0.0),
        sharded=sharded_s, reduce=reduce_bare + gather_bare, update=update_s,
        fixed=np.full(len(c), f["step_s"]), stragglers=late,
    )  # fmt: skip


def _add_seconds(c: Columns, f: Factors, weights: Column) -> Column:
    """Of a microbatch: its gradients are written, read, and added to the sum. A shard's sum is short.

    Gradients have the precision of what computes; their sum has bytes of its own, four in our runs.
    """
    sent = ((c.zero == 2) & (c.reduce_each > 0)) | ((c.zero == 3) & (c.each_microbatch > 0))  # and none is added up
    fused = (c.fused_gradients > 0) & (c.num_microbatches >= c.fused_gradients) & ~sent
    share = np.where(fused, f["add_fused"], f["add_share"])
    sums = np.where((c.zero == 3) & (c.each_microbatch > 0), 0.0, 2 * c.sum_bytes)
    found: Column = share * (c.precision + sums) * weights / (c.memory_Bps * f["stream_share"])
    return found


def _over_dp(c: Columns, f: Factors, held: Column) -> tuple[Column, Column]:
    """Seconds that summing gradients and gathering weights take by themselves, once a step."""
    whole = dp_group(c, f, c.dp)
    shard = dp_group(c, f, np.where(c.zero < 3, c.shard, 1.0))
    summed = c.reduce_bytes * held
    reduce_s = np.where(
        c.zero == 3, copies_group(c, f).reduced(summed / c.shard),
        np.where((c.zero > 0) & (c.shard == c.dp) & (c.reduce_whole == 0), whole.shared(summed), whole.reduced(summed)),
    )  # fmt: skip
    return reduce_s, np.where((c.zero > 0) & (c.zero < 3), shard.shared(c.precision * held), 0.0)
