"""A model's integers give the published counts of weights and FLOPs."""

from __future__ import annotations

import dataclasses

import pytest

from lmtrain.spec import ModelShape

GPT2_SMALL = ModelShape(
    num_layers=12, width=768, num_heads=12, num_kv_heads=12, head_width=64, ffn_width=3072, gated=False,
    vocab_size=50257, seq_len=1024,
)  # fmt: skip


def test_a_gpt2_block_has_twelve_squares_of_its_width() -> None:
    assert GPT2_SMALL.block_matrix_params == 12 * 768**2


def test_flops_follow_the_closed_form_of_gpt2_shapes() -> None:
    layers, width, vocab, seq = 12, 768, 50257, 1024
    closed = 72 * layers * width**2 * (1 + seq / (6 * width)) + 6 * width * vocab
    assert GPT2_SMALL.flops_per_token() == pytest.approx(closed, rel=1e-12)


def test_a_shorter_sequence_and_a_window_cost_less_attention() -> None:
    attention = 12 * 12 * 768
    full = GPT2_SMALL.flops_per_token()
    assert full - GPT2_SMALL.flops_per_token(scored_share=0.15) == pytest.approx(0.85 * 6 * 768 * 50257)
    assert full - GPT2_SMALL.flops_per_token(256) == pytest.approx(attention * (1024 - 256))
    windowed = dataclasses.replace(GPT2_SMALL, window=128, num_window_layers=12)
    assert full - windowed.flops_per_token() == pytest.approx(attention * (1024 - 128))
    assert windowed.flops_per_token(64) == GPT2_SMALL.flops_per_token(64)
    five_of_twelve = dataclasses.replace(windowed, num_window_layers=5)
    assert full - five_of_twelve.flops_per_token() == pytest.approx(5 / 12 * attention * (1024 - 128))


def test_attention_costs_what_its_heads_are_wide_together() -> None:
    """Heads need not make up the width, and each query is compared with keys however few heads have keys."""
    narrow = dataclasses.replace(GPT2_SMALL, num_heads=8, num_kv_heads=2)
    longer = narrow.flops_per_token(1024) - narrow.flops_per_token(1024 - 100)
    assert longer == pytest.approx(12 * 12 * (8 * 64) * 100)


def test_gated_and_grouped_blocks() -> None:
    shape = dataclasses.replace(GPT2_SMALL, num_kv_heads=4, ffn_width=2048, gated=True)
    assert shape.block_matrix_params == 768 * 64 * (12 + 12 + 4 + 4) + 3 * 768 * 2048
