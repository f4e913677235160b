"""Rows in words: what is known is said, what is not is left out."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from lmtrain.observe.screen.live_panel import RunPanel
from lmtrain.observe.screen.metrics_row_text import (
    eval_line,
    format_clock,
    format_flops,
    smoothed_loss,
    sparkline,
    speed_figures,
    step_line,
    valid_line,
)

FULL: dict[str, Any] = {
    "step": 100, "loss": 3.21449, "lr": 3e-4, "grad_norm": 0.8412, "tokens_per_s": 12345.0, "flops_per_s": 4.12e14,
    "mfu": 0.4164, "data_wait_s": 0.0012, "memory_bytes": 61 << 30, "samples": 51200, "tokens": 52_428_800,
    "elapsed_s": 3725.0, "eta_s": 721.0, "skipped": 0,
}  # fmt: skip


def test_a_full_row_is_one_line() -> None:
    assert step_line(FULL, 2000) == (
        "step  100/2000  loss 3.2145  lr 3.00e-04  grad 0.841  12.3k tok/s  412 TFLOP/s  mfu 41.6%"
        "  wait 1.2 ms  mem 61.0 GiB  left 12m01s"
    )


def test_losses_of_few_sources_are_shown_and_others_counted() -> None:
    row = {"step": 8, "loss": 3.25, "sources": {"wiki": {"loss": 3.0, "tokens": 4}, "code": {"tokens": 0}}}
    assert "loss 3.2500 [wiki 3.0000]" in step_line(row, 10)
    many = row | {"sources": {f"s{i}": {"loss": float(i)} for i in range(9)}}
    assert "[s0 0.0000, s1 1.0000, s2 2.0000, s3 3.0000, 5 more]" in step_line(many, 10)


def test_a_row_without_figures_is_only_its_step() -> None:
    assert step_line({"step": 7, "loss": None}, 10) == "step  7/10"


def test_skipped_steps_and_bad_losses_are_said() -> None:
    assert step_line({"step": 1, "loss": math.nan, "skipped": 3}, 9) == "step 1/9  loss nan  skipped 3"


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(math.log(20), "loss 2.9957  perplexity per token 20.00"), (math.inf, "loss inf"), (None, "loss -")],
)
def test_validation_lines(loss: float | None, expected: str) -> None:
    assert valid_line({"step": 50, "loss": loss}) == f"valid at step 50  {expected}"


def test_terms_of_a_loss_are_said_behind_it() -> None:
    terms = {"loss": 3.5, "loss/mlm": math.log(20), "loss/pair": 0.5}
    assert step_line({"step": 7, **terms}, 10) == "step  7/10  loss 3.5000 (mlm 2.9957, pair 0.5000)"
    row = {"step": 7, **terms, "ppl": 20.0, "accuracy": 0.25, "accuracy/pair": 0.5}
    said = "loss 3.5000 (mlm 2.9957, pair 0.5000)  perplexity per token 20.00  accuracy 25.0%, pair 50.0%"
    assert valid_line(row) == f"valid at step 7  {said}"
    console = Console(width=80, record=True, file=io.StringIO(), legacy_windows=False)
    panel = RunPanel({}, 10)
    panel.show_row({"event": "step", "step": 7, **terms})
    console.print(panel)
    assert "its terms     mlm 2.9957, pair 0.5000" in console.export_text()


def test_the_average_of_the_weights_is_shown_behind_the_weights() -> None:
    row: dict[str, Any] = {"step": 7, "loss": 0.0, "ema": {"loss": 3.25, "domains": {"wiki": {"loss": 2.5}}}}
    said = "loss 0.0000  perplexity per token 1.00  average of the weights 3.2500 [wiki 2.5000]"
    assert valid_line(row) == f"valid at step 7  {said}"
    row = {"step": 7, "name": "x", "headline": "nll", "measures": {"nll": 2.0}, "ema": {"nll": 1.5}}
    assert eval_line(row) == "eval at step 7  x  nll 2.0000  average of the weights nll 1.5000"


def test_a_z_loss_is_shown_beside_the_loss() -> None:
    row = {"step": 7, "loss": 3.5, "z_loss": 0.0125}
    assert step_line(row, 10) == "step  7/10  loss 3.5000  z-loss 1.25e-02"
    console = Console(width=80, record=True, file=io.StringIO(), legacy_windows=False)
    panel = RunPanel({}, 10)
    panel.show_row({"event": "step", **row})
    console.print(panel)
    assert "z-loss        1.25e-02" in console.export_text()


def test_time_of_this_start_and_tokens_of_all_are_told_apart() -> None:
    assert dict(speed_figures(FULL))["elapsed"] == "1h02m, 52.4M tokens"
    assert dict(speed_figures(FULL | {"attempt": 2}))["elapsed"] == "1h02m this start, 52.4M tokens in all"


@pytest.mark.parametrize(
    ("value", "text"), [(1.5e15, "1.5 PFLOP"), (3e9, "3 GFLOP"), (2e5, "0.2 MFLOP")]
)
def test_flops(value: float, text: str) -> None:
    assert format_flops(value) == text


def test_a_falling_loss_falls() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([8, 8, 1, 1], 2) == "█▁"
    assert sparkline([2, math.nan, 1], 9) == "█ ▁"
    assert sparkline([1, 1], 2) == "▁▁"


def test_a_smoothed_loss_follows_slowly_and_leaves_out_what_is_no_number() -> None:
    assert smoothed_loss([]) is smoothed_loss([math.nan]) is None
    assert smoothed_loss([2.0]) == 2.0
    assert smoothed_loss([2.0, 1.0]) == pytest.approx((0.9 * 2 + 1) / 1.9)
    assert smoothed_loss([3.0] * 9 + [math.inf]) == pytest.approx(3.0)


def test_a_clock_has_whole_seconds() -> None:
    assert [format_clock(value) for value in (0.4, 59.99, 61.7, 3725)] == ["0s", "59s", "1m01s", "1h02m"]


@example(values=[0.0, 1e-310], width=2)
@given(values=st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=60), width=st.integers(0, 40))
def test_a_sparkline_is_never_wider_than_asked(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))
