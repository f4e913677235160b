"""How far the planner's memory is from published runs: gigabytes, and who ran out of memory.

python -m tests.benchmarks.plan_memory published_runs.csv [--rows SOURCE]
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmtrain.plan.case import Columns, columns
from lmtrain.plan.factors import MEMORY_FACTORS, MEMORY_NAMES, Factors
from lmtrain.plan.memory import price_memory
from tests.benchmarks.published_runs import PROGRAMS, Row, case_of, read_rows, why_not

Floats = NDArray[np.float64]
LOW = np.array([MEMORY_FACTORS[name].low for name in MEMORY_NAMES])
HIGH = np.array([MEMORY_FACTORS[name].high for name in MEMORY_NAMES])
NOMINAL = np.array([MEMORY_FACTORS[name].value for name in MEMORY_NAMES])
PULL = 0.003


def kind_of(row: Row) -> str:
    if row["mem_GB"]:
        return "measured"
    if row["metric"] == "fits_in_memory":
        return "oom" if row["value"].startswith("OOM") else ""
    return "fits" if row["source"] == "hagemann2023" else ""


def price(c: Columns, values: Floats) -> Floats:
    return price_memory(c, Factors(dict(zip(MEMORY_NAMES, values, strict=True)))).total


def residuals(c: Columns, kinds: Floats, true: Floats, values: Floats) -> Floats:
    """log(predicted / measured); of rows that fit or did not, only how far they are on the wrong side."""
    r = np.log(price(c, values) / true)
    margin = 0.02
    return np.where(kinds == 0, r, np.where(kinds == 1, np.maximum(r + margin, 0), np.minimum(r - margin, 0)))


def fit(c: Columns, kinds: Floats, true: Floats, weights: Floats) -> Floats:
    scale = (HIGH - LOW) / 4
    x, damp = np.array(NOMINAL), 1e-2

    def cost(values: Floats, r: Floats) -> float:
        s = 0.05
        return float(
            (weights * s * s * (np.sqrt(1 + (r / s) ** 2) - 1)).sum() + PULL * (((values - NOMINAL) / scale) ** 2).sum()
        )

    r = residuals(c, kinds, true, x)
    best = cost(x, r)
    for _ in range(25):
        step = 1e-3 * scale
        jacobian = np.stack(
            [(residuals(c, kinds, true, x + np.eye(len(x))[k] * step) - r) / step[k] for k in range(len(x))], 1
        )
        w = weights / np.sqrt(1 + (r / 0.05) ** 2)
        normal = (jacobian * w[:, None]).T @ jacobian + np.diag(PULL / scale**2)
        gradient = (jacobian * w[:, None]).T @ r + PULL * (x - NOMINAL) / scale**2
        for _ in range(6):
            trial = np.clip(x - np.linalg.solve(normal + damp * np.diag(np.diag(normal)), gradient), LOW, HIGH)
            trial_r = residuals(c, kinds, true, trial)
            found = cost(trial, trial_r)
            if found < best:
                x, r, best, damp = trial, trial_r, found, damp / 3
                break
            damp *= 4
        else:
            break
    return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows")
    args = parser.parse_args()
    rows: list[Row] = []
    reasons = Counter[str]()
    for row in read_rows(args.path):
        if not kind_of(row) or row["source"] not in PROGRAMS:
            continue
        reason = why_not(row)
        if reason:
            reasons[f"{kind_of(row)}: {reason}"] += 1
        else:
            rows.append(row)
    c = columns([case_of(row) for row in rows])
    kinds = np.array([{"measured": 0.0, "fits": 1.0, "oom": 2.0}[kind_of(row)] for row in rows])
    # because: torchtitan prints GiB, and the others' tools do although the column says GB
    measured = np.array(
        [float(row["mem_GB"] or 0) * (1e9 if row["source"] == "mcore_ci_7b" else 2**30) for row in rows]
    )
    true = np.where(kinds == 0, measured, c.memory_bytes)
    sources = [row["source"] for row in rows]
    counts = Counter(zip(sources, kinds.tolist(), strict=True))
    weights = np.array([counts[key] ** -0.5 for key in zip(sources, kinds.tolist(), strict=True)])
    print(len(rows), "rows;", dict(reasons))
    x = fit(c, kinds, true, weights)
    for name, value in zip(MEMORY_NAMES, x, strict=True):
        print(f"    {name:16} {value:8.3g}  [{MEMORY_FACTORS[name].low:g}, {MEMORY_FACTORS[name].high:g}]")
    report(sources, kinds, np.log(price(c, x) / true))
    if args.rows:
        m = price_memory(c, Factors(dict(zip(MEMORY_NAMES, x, strict=True))))
        for at, row in enumerate(rows):
            wrong = kinds[at] == 0 or (kinds[at] == 1) != (m.total[at] < true[at])
            if row["source"] == args.rows and wrong:
                g = 2.0**30
                print(
                    f"  {row['row_id'][-3:]} {kind_of(row):8} h{row['hidden']} L{row['layers']} s{row['seq_len']} mb{row['micro_batch']} tp{row['tp']} pp{row['pp']} v{c.vp[at]:g} dp{c.dp[at]:g} z{c.zero[at]:g} {row['recompute'][:4]} sp{c.sequence_parallel[at]:g} a{c.attention[at]:g} n{c.eager_norm[at]:g} true {true[at] / g:6.1f} said {m.total[at] / g:6.1f}: w {m.weights[at] / g:.1f} g {m.gradients[at] / g:.1f} o {m.optimizer[at] / g:.1f} act {m.activations[at] / g:.1f} work {m.working[at] / g:.1f} log {m.logits[at] / g:.1f} buf {m.gathered[at] / g:.1f} slack {m.slack[at] / g:.1f} {row['notes'][:30]}"
                )


def report(sources: Sequence[str], kinds: Floats, r: Floats) -> None:
    measured = kinds == 0
    print(f"measured: {measured.sum()} rows, median |error| {np.median(np.abs(np.expm1(r[measured]))):.1%}")
    by = defaultdict(list)
    for source, kind, one in zip(sources, kinds, r, strict=True):
        by[source, int(kind)].append(one)
    for (source, kind), ones in sorted(by.items()):
        e = np.array(ones)
        if kind == 0:
            print(
                f"  {source:22} {len(e):4} median |e| {np.median(np.abs(np.expm1(e))):.1%}  bias {np.median(np.expm1(e)):+.1%}  worst {np.abs(np.expm1(e)).max():.0%}"
            )
        else:
            right = (e < 0) if kind == 1 else (e > 0)
            print(
                f"  {source:22} {len(e):4} {'fits' if kind == 1 else 'out of memory'}: called right {right.mean():.1%}"
            )
    print(f"fits {(r[kinds == 1] < 0).mean():.1%}, out of memory {(r[kinds == 2] > 0).mean():.1%}")


if __name__ == "__main__":
    main()
