"""Seconds of products by shape, of attention by kernel, of pointwise work by bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmtrain.plan.cost_model.step_time_and_energy import price_work, product_seconds
from lmtrain.plan.cost_model.training_workload import Attention, Case, PerCase, Program, stack_cases
from tests.unit.plan.cases import gpt3
from tests.unit.plan.machines import nominal

F = nominal()


def seconds(case: Case, rows: int, out: int, inner: int) -> float:
    one: PerCase = np.ones(1)
    return float(product_seconds(stack_cases([case]), F, rows * one, out * one, inner * one)[0])


def test_a_large_product_runs_at_the_sustained_rate() -> None:
    taken = seconds(gpt3(), 16384, 12288, 12288)
    rate = 2 * 16384 * 12288 * 12288 / taken / 312e12
    assert rate == pytest.approx(F["sustain_ampere"], abs=0.03)


def test_a_side_that_is_no_multiple_of_64_costs() -> None:
    assert seconds(gpt3(), 8192, 1800, 14400) > 1.2 * seconds(gpt3(), 8192, 1792, 14400)


def test_a_thin_product_is_bound_by_memory() -> None:
    assert seconds(gpt3(), 16, 12288, 12288) > 2 * 12288 * 12288 / 2.1e12


@pytest.mark.parametrize("better", [Attention.FUSED, Attention.FLASH1, Attention.FLASH2])
def test_each_kernel_of_attention_beats_the_one_before(better: Attention) -> None:
    case = gpt3(seq_len=4096, precision="bf16")
    worse = Attention(better - 1)
    both = [replace(case, program=Program(attention=kernel)) for kernel in (worse, better)]
    work = price_work(stack_cases(both), F)
    assert work.attention[1] + work.attention_back[1] < work.attention[0] + work.attention_back[0]


def test_a_width_of_heads_that_is_no_multiple_of_8_is_slow() -> None:
    work = price_work(stack_cases([gpt3(head_width=108), gpt3(head_width=112)]), F)
    assert work.attention[0] > 1.5 * work.attention[1]


@pytest.mark.parametrize("short", [(512, 13824, 13824), (13824, 512, 13824), (13824, 13824, 512)])
def test_a_short_side_costs_wherever_it_is(short: tuple[int, int, int]) -> None:
    """Of sides that fill 108 cores to the last wave, so that nothing else differs."""
    slower = seconds(gpt3(), *short) / seconds(gpt3(), 13824, 13824, 13824) * 13824 / 512
    ramp = F["side_ramp"]
    assert slower == pytest.approx((1 + ramp * (1 / 512 + 2 / 13824)) / (1 + ramp * 3 / 13824), rel=0.01)


def test_narrow_heads_cost_the_later_flash_kernels() -> None:
    for kernel, slower in ((Attention.FLASH1, 1.0), (Attention.FLASH2, (1 + 16 / 64) / (1 + 16 / 128))):
        heads = [(96, 128), (192, 64)]
        cases = [gpt3(num_heads=n, num_kv_heads=n, head_width=width, program=Program(attention=kernel),
                      precision="bf16") for n, width in heads]  # fmt: skip
        wide, narrow = price_work(stack_cases(cases), F).attention
        assert narrow / wide == pytest.approx(slower)


def test_a_loss_of_one_kernel_moves_less() -> None:
    single, one = (gpt3(program=Program(fused_loss=fused)) for fused in (False, True))
    apart = np.diff(price_work(stack_cases([one, single]), F).head)[0]
    logits = single.microbatch * single.seq_len * single.vocab / single.tp
    bytes_less = logits * F["loss_bytes"] * (1 - F["loss_fused"])
    assert apart == pytest.approx(bytes_less / (single.hardware.memory_GBps * 1e9 * F["stream_share"]))


def test_layers_with_a_window_are_priced_by_their_share() -> None:
    """Full layers count as causal, and a window as wide as it is."""
    half = gpt3(precision="bf16", window=256, window_share=0.5)
    full, all_windows = replace(half, window=0), replace(half, window_share=1.0, causal=False)
    attention = price_work(stack_cases([half, full, all_windows]), F).attention
    assert attention[0] == pytest.approx((attention[1] + attention[2]) / 2)


@pytest.mark.parametrize("more", [{"extra_norms": 2}, {"qk_norm": True}])
def test_more_norms_are_more_pointwise_work(more: dict[str, Any]) -> None:
    work = price_work(stack_cases([gpt3(), gpt3(**more)]), F)
    assert work.pointwise[1] > 1.01 * work.pointwise[0]
    assert work.pointwise_back[1] > 1.01 * work.pointwise_back[0]
    assert work.products[1] == work.products[0]


def test_scaled_and_capped_logits_are_passed_over_again() -> None:
    changes: list[dict[str, Any]] = [{}, {"scaled_logits": True}, {"scaled_logits": True, "capped_logits": True}]
    head = price_work(stack_cases([gpt3(**change) for change in changes]), F).head
    assert head[0] < head[1] < head[2]
