"""Seconds that one device computes: products by their shape, attention by its kernel, the rest by its bytes.

Everything is for one microbatch and one block, or the head; arrays have one entry a case. Knows no collective.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmtrain.plan.price.factors import Factors
from lmtrain.plan.price.workload import Attention, Column, Columns, Pointwise

SUSTAIN = ("sustain_volta", "sustain_ampere", "sustain_hopper", "sustain_blackwell", "sustain_ampere")
TILES = ((256, 128), (128, 128))
NORMS_PASSES, FLASH_BACKWARD = 11.0, 2.5
EAGER_ROTARY = 10.0  # two products, a turned copy of two halves, a sum: reads and writes of each number


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
        """Without what recompute does again."""
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
    """Of the input, and of the weight."""
    return product(c, f, rows, inner, columns, whole=whole) + product(c, f, columns, inner, rows, whole=whole)


def _fill(c: Columns, f: Factors, rows: Column, columns: Column) -> Column:
    """How full the device is: tiles are dealt out in waves, and the last wave may be nearly empty."""
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
    """The least traffic, in numbers a token, times what the kind of kernels makes of it."""
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
