"""Metric rows as text: the line of a step, the panel's figures and the sparkline. Used only by the views.

A figure that a row lacks is left out of a line, and shown as a dash in the panel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lmtrain.runfolder.run_facts import SPEED_WINDOW_STEPS
from lmtrain.units import format_bytes, format_count, format_measure, format_seconds

Row = Mapping[str, Any]
_BARS = "▁▂▃▄▅▆▇█"
_SOURCES_IN_A_LINE = 4
_DECAY = 0.9  # factor by which the weight of older losses falls with each row


def step_line(row: Row, total_steps: int) -> str:
    """Format a step row of metrics.jsonl as one line: `step  100/2000  loss 3.2140  lr 3.00e-04  grad 0.840 ...`."""
    figures: tuple[tuple[str, str, Callable[[float], str], str], ...] = (
        ("loss", "loss ", "{:.4f}".format, format_terms(row) + format_sources(row)),
        ("z_loss", "z-loss ", "{:.2e}".format, ""),
        ("lr", "lr ", "{:.2e}".format, ""),
        ("grad_norm", "grad ", "{:.3f}".format, ""),
        ("tokens_per_s", "", format_count, " tok/s"),
        ("flops_per_s", "", format_flops, "/s"),
        ("mfu", "mfu ", format_percent, ""),
        ("data_wait_s", "wait ", format_milliseconds, ""),
        ("memory_bytes", "mem ", format_bytes, ""),
        ("eta_s", "left ", format_seconds, ""),
    )
    return "  ".join([
        f"step {row['step']:>{len(str(total_steps))}}/{total_steps}",
        *(f"{before}{form(row[key])}{after}" for key, before, form, after in figures if row.get(key) is not None),
        *([f"skipped {row['skipped']}"] if row.get("skipped") else []),
    ])  # fmt: skip


def valid_line(row: Row) -> str:
    loss = row.get("loss")
    text = f"valid at step {row['step']}  loss {'-' if loss is None else f'{loss:.4f}'}"
    text += format_terms(row) + format_domains(row)
    if loss is not None and math.isfinite(loss):
        tokens = next((row[key] for key in row if key.startswith("loss/")), loss)  # the loss of the first term
        text += f"  perplexity per token {format_perplexity(tokens)}"
    accuracies = [
        f"{key.replace('accuracy/', '')} {format_percent(row[key])}" for key in row if key.startswith("accuracy")
    ]
    average = row.get("ema")
    of_average = [f"average of the weights {average['loss']:.4f}{format_domains(average)}"] if average else []
    return "  ".join([text, *[", ".join(accuracies)] * bool(accuracies), *of_average])


def format_domains(row: Row) -> str:
    """Return ` [wiki 3.2101, code 2.0942]`, the losses per data domain of a validation row, or an empty string if it
    has none.
    """
    losses = [f"{name} {values['loss']:.4f}" for name, values in row.get("domains", {}).items()]
    return f" [{', '.join(losses)}]" if losses else ""


def format_sources(row: Row) -> str:
    """Return the loss of each data source in a step row as text, such as ` [wiki 3.2101, code 2.0942, 3 more]`: only
    the first sources are listed, the others counted. Return an empty string if the row has none.
    """
    losses = [f"{name} {values['loss']:.4f}" for name, values in row.get("sources", {}).items() if "loss" in values]
    more = [f"{len(losses) - _SOURCES_IN_A_LINE} more"] * (len(losses) > _SOURCES_IN_A_LINE)
    return f" [{', '.join([*losses[:_SOURCES_IN_A_LINE], *more])}]" if losses else ""


def eval_line(row: Row) -> str:
    """Format an evaluation row of metrics.jsonl as one line: the step, the task and its measures, the headline measure
    first, then those of the averaged weights if the row has them.
    """
    average = eval_figures({**row, "measures": row["ema"]}) if row.get("ema") else []
    of_average = f"  average of the weights {', '.join(average)}" if average else ""
    return f"eval at step {row['step']}  {row['name']}  {', '.join(eval_figures(row))}{of_average}"


def eval_figures(row: Row) -> list[str]:
    measures = sorted(row["measures"].items(), key=lambda measure: measure[0] != row["headline"])
    return [f"{name.replace('_', ' ')} {format_measure(name, value)}" for name, value in measures]


def format_terms(row: Row) -> str:
    """Return ` (mlm 6.1234, pair 0.6931)` if the loss has several terms, else an empty string."""
    losses = [f"{key.removeprefix('loss/')} {row[key]:.4f}" for key in row if key.startswith("loss/")]
    return f" ({', '.join(losses)})" if losses else ""


def loss_figures(row: Row, valid: Row) -> tuple[str, str]:
    """Return two texts: the loss of the step row `row`, and the loss of the validation row `valid` with its step. A
    dash stands for a row without a loss.
    """
    loss, validation = row.get("loss"), valid.get("loss")
    return (
        "-" if loss is None else f"{loss:.4f}{format_sources(row)}",
        "-" if validation is None else f"{validation:.4f} at step {valid['step']}{format_domains(valid)}",
    )


def speed_figures(row: Row) -> list[tuple[str, str]]:
    """Return (name, text) pairs of a step row for the panel: speed, compute, data wait, memory and elapsed time."""

    def figure(key: str, form: Callable[[float], str], unit: str = "") -> str:
        return "-" if row.get(key) is None else f"{form(row[key])}{unit}"

    mfu = "" if row.get("mfu") is None else f", MFU {format_percent(row['mfu'])}"
    of_start, in_all = (" this start", " in all") if row.get("attempt", 1) > 1 else ("", "")
    return [
        (f"last {SPEED_WINDOW_STEPS} steps", figure("tokens_per_s", format_count, " tokens/s")),
        ("compute", figure("flops_per_s", format_flops, "/s") + mfu),
        ("data wait", figure("data_wait_s", format_milliseconds, " a step")),
        ("memory", figure("memory_bytes", format_bytes) + _fullest_rank_text(row)),
        ("elapsed", figure("elapsed_s", format_clock) + of_start
                    + ("" if row.get("tokens") is None else f", {format_count(row['tokens'])} tokens{in_all}")),
    ]  # fmt: skip


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` as a line of at most `width` bar characters, such as "▁▃▇". Each character is the mean of an equal
    share of the values, or a space if that mean is not finite.
    """
    if width < 1 or not values:
        return ""
    width = min(width, len(values))
    edges = (i * len(values) // width for i in range(width + 1))
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [m for m in means if math.isfinite(m)]
    if not finite:
        return " " * width
    low, high = min(finite), max(finite)
    # because: all bars by a range of 1e-310 are infinite, and a share of the range never is
    span = high - low or 1.0
    return "".join(_BARS[round((m - low) / span * (len(_BARS) - 1))] if math.isfinite(m) else " " for m in means)


def format_flops(value: float) -> str:
    """Format a number of floating-point operations, such as "3.14 TFLOP"; from 1e18 on as papers do, such as "3.14e+23
    FLOP".
    """
    if value >= 1e18:
        return f"{value:.3g} FLOP"
    units = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"))
    size, name = next((unit for unit in units if value >= unit[0]), (1e6, "MFLOP"))
    return f"{value / size:.3g} {name}"


def format_percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def smoothed_loss(losses: Sequence[float]) -> float | None:
    """Return the exponentially weighted mean of the finite values in `losses`, in which the newest value weighs most;
    None if there are none.
    """
    mean, weight = 0.0, 0.0
    for loss in losses:
        if math.isfinite(loss):
            mean, weight = _DECAY * mean + loss, _DECAY * weight + 1
    return mean / weight if weight else None


def format_milliseconds(value: float | None) -> str:
    if value is not None and value >= 120:
        return format_seconds(value)
    return "-" if value is None else f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def format_perplexity(loss: float) -> str:
    return f"{math.exp(loss):.2f}" if loss < 20 else "above 4.8e8"


def _fullest_rank_text(row: Row) -> str:
    """Return the text that names the rank with the most memory; empty for a run of one process."""
    has_several_ranks = row.get("memory_rank") or "straggler_slowest" in row or "straggler_exposed" in row
    return f" on rank {row['memory_rank']}" if has_several_ranks and "memory_rank" in row else ""


def format_clock(value: float) -> str:
    """Format seconds for a clock that is redrawn, in whole seconds."""
    return f"{int(value)}s" if value < 60 else format_seconds(int(value))
