"""Rates follow from the times given in, and peaks from the device's name."""

from __future__ import annotations

import pytest

from lmtrain.observe.measure.throughput import Rates, Throughput, peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "torch.bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA GH200 480GB", "fp16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA H200", "int8", None),
        ("NVIDIA H200", "tf32", 494.7e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("Tesla V100-SXM2-16GB", "tf32", 15.7e12),
        ("Intel(R) Xeon(R) CPU", "tf32", None),
        ("Intel(R) Xeon(R) CPU", "fp32", None),
        ("cpu", "bf16", None),
    ],
)
def test_peaks(name: str, dtype: str, expected: float | None) -> None:
    assert peak_flops(name, dtype) == expected


def test_nothing_is_known_before_the_first_step() -> None:
    meter = Throughput(flops_per_token=6.0, peak=1.0)
    assert meter.rates(10) == Rates()
    meter.start(0, 5.0)
    assert meter.rates(10) == Rates()
    with pytest.raises(ValueError, match="start"):
        Throughput().step_done(1, 0.0, 1)


def test_rates_are_sums_over_the_window() -> None:
    meter = Throughput(flops_per_token=10.0, peak=1000.0, window_steps=2)
    meter.start(0, 0.0)
    meter.step_done(1, 100.0, 7)
    meter.step_done(2, 200.0, 7)  # a slow step leaves the window
    meter.step_done(3, 201.0, 30)
    meter.step_done(4, 204.0, 90)
    assert meter.rates(14) == Rates(tokens_per_s=30.0, flops_per_s=300.0, mfu=0.3, eta_s=20.0)


def test_the_first_step_of_a_process_is_in_no_rate() -> None:
    """It compiles. With it, the three steps here would make 100 tokens in 101 s."""
    meter = Throughput(flops_per_token=10.0, peak=1000.0)
    meter.start(5, 0.0)
    meter.step_done(6, 100.0, 40)
    assert meter.rates(10) == Rates()
    meter.step_done(7, 100.5, 30)
    meter.step_done(8, 101.0, 30)
    assert meter.rates(10) == Rates(tokens_per_s=60.0, flops_per_s=600.0, mfu=0.6, eta_s=1.0)


def test_a_pause_is_not_counted() -> None:
    meter = Throughput()
    meter.start(0, 0.0)
    meter.step_done(1, 1.0, 10)
    meter.step_done(2, 2.0, 10)
    meter.start(2, 50.0)
    meter.step_done(3, 52.0, 10)
    assert meter.rates().tokens_per_s == 5.0
    assert meter.rates().mfu is None
    assert meter.rates(2).eta_s == 0.0
