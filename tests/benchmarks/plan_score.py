"""How far the planner's times are from published runs: errors, intervals, rankings and memory.

    python -m tests.benchmarks.plan_score published_runs.csv [--leave-one-out] [--rows SOURCE]

Fits the factors, without the source that is judged where asked, and prints a table. Skips nothing silently: each row
that is not scored is counted with its reason.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmtrain.plan.case import Columns, columns
from lmtrain.plan.factors import FACTORS, NAMES, Factors
from lmtrain.plan.step import price_step
from tests.benchmarks.published_runs import Published, published, read_rows, seconds_of, why_not

Floats = NDArray[np.float64]


def scored(path: Path) -> tuple[list[Published], Counter[str]]:
    """Rows to price, and how many are left out for which reason."""
    found, reasons = [], Counter[str]()
    for row in read_rows(path):
        if not seconds_of(row):
            continue
        reason = why_not(row)
        if reason:
            reasons[reason] += 1
        else:
            found.append(published(row))
    return found, reasons


def errors(c: Columns, seconds: Floats, values: Floats) -> Floats:
    """log(predicted / published)."""
    factors = Factors(dict(zip(NAMES, values, strict=True)))
    return np.log(price_step(c, factors).total / seconds)


LOW = np.array([FACTORS[name].low for name in NAMES])
HIGH = np.array([FACTORS[name].high for name in NAMES])
NOMINAL = np.array([FACTORS[name].value for name in NAMES])


def fit(c: Columns, seconds: Floats, weights: Floats, start: Floats | None = None, rounds: int = 12) -> Floats:
    """Levenberg-Marquardt with weights that shrink for far-off rows, and a pull to each factor's nominal value."""
    scale = (HIGH - LOW) / 4
    x = np.array(NOMINAL if start is None else start)
    damp = 1e-2

    def cost(values: Floats, r: Floats) -> float:
        s = 0.05
        return float(
            (weights * s * s * (np.sqrt(1 + (r / s) ** 2) - 1)).sum() + PULL * (((values - NOMINAL) / scale) ** 2).sum()
        )

    r = errors(c, seconds, x)
    best = cost(x, r)
    for _ in range(rounds):
        step = 1e-3 * scale
        jacobian = np.stack(
            [(errors(c, seconds, x + np.eye(len(x))[k] * step) - r) / step[k] for k in range(len(x))], 1
        )
        w = weights / np.sqrt(1 + (r / 0.05) ** 2)
        normal = (jacobian * w[:, None]).T @ jacobian + np.diag(PULL / scale**2)
        gradient = (jacobian * w[:, None]).T @ r + PULL * (x - NOMINAL) / scale**2
        for _ in range(6):
            move = np.linalg.solve(normal + damp * np.diag(np.diag(normal)), -gradient)
            trial = np.clip(x + move, LOW, HIGH)
            trial_r = errors(c, seconds, trial)
            found = cost(trial, trial_r)
            if found < best:
                gain, x, r, best, damp = best - found, trial, trial_r, found, damp / 3
                break
            damp *= 4
        else:
            break
        if gain < 1e-5 * best:
            break
    return x


PULL = 0.003


def source_weights(sources: Sequence[str]) -> Floats:
    """A source counts as the square root of its rows: 300 of one study are not 300 sources."""
    counts = Counter(sources)
    return np.array([counts[source] ** -0.5 for source in sources])


def report(sources: Sequence[str], r: Floats, title: str) -> None:
    print(
        f"\n{title}: {len(r)} rows, median |error| {np.median(np.abs(np.expm1(r))):.1%}, over 35%: {(np.abs(np.expm1(r)) > 0.35).sum()}"
    )
    by = defaultdict(list)
    for source, one in zip(sources, r, strict=True):
        by[source].append(one)
    for source, ones in sorted(by.items(), key=lambda item: -len(item[1])):
        e = np.expm1(np.array(ones))
        print(
            f"  {source:26} {len(ones):4}  median |e| {np.median(np.abs(e)):6.1%}  bias {np.median(e):+6.1%}  worst {np.abs(e).max():6.1%}"
        )


def ranks(values: Floats) -> Floats:
    """Equal values share the mean of their ranks."""
    found = values.argsort().argsort().astype(np.float64)
    for value in set(values.tolist()):
        found[values == value] = found[values == value].mean()
    return found


def studies(runs: Sequence[Published], r: Floats) -> None:
    """One model, one machine, one batch: does the planner rank layouts as the measurements do?"""
    groups: dict[tuple[str, ...], dict[tuple[object, ...], list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for run, one in zip(runs, r, strict=True):
        k, row = run.case, run.row
        group = (
            row["source"],
            row["params_B"],
            row["layers"],
            row["hidden"],
            row["heads"] if row["source"] != "bloom_tuning" else "",
            row["gpus"],
            row["seq_len"],
            row["global_batch"],
            row["hardware"],
        )
        layout = (
            k.tp,
            k.pp,
            k.vp,
            k.dp,
            k.microbatch,
            k.sequence_parallel,
            row["recompute"],
            k.schedule,
            k.zero,
            k.shard,
        )
        groups[group][layout].append((run.seconds, run.seconds * float(np.exp(one))))
    print("\nstudies of six layouts or more: rank correlation, and what the chosen layout costs beside the best")
    for group, layouts in sorted(groups.items()):
        if len(layouts) < 6 or len({(l[0], l[1]) for l in layouts}) < 2:
            continue
        best = {layout: min(ones) for layout, ones in layouts.items()}
        true = np.array([b[0] for b in best.values()])
        said = np.array([min(p for _, p in layouts[l]) for l in best])
        grain = 1.0 if group[0] == "bigscience_1b3_v100" else 1e-3  # figures are printed to so many seconds
        rank = np.corrcoef(ranks(true), ranks(np.round(said / grain)))[0, 1]
        print(
            f"  {group[0]:20} {group[1]:>5}B h{group[3]} {group[5]:>4} GPUs s{group[6]} batch {group[7]:>5} {len(best):3} layouts  rho {rank:.3f}  chosen {true[said.argmin()] / true.min() - 1:+.1%}"
        )


def intervals(sources: Sequence[str], r: Floats) -> None:
    """80% intervals, each source's width from the errors of the others, of all rows alike."""
    names = np.array(sources)
    held = np.zeros(len(r), dtype=bool)
    widths = np.zeros(len(r))
    for source in set(sources):
        mine = names == source
        width = float(np.quantile(np.abs(r[~mine]), 0.8))
        held[mine], widths[mine] = np.abs(r[mine]) <= width, np.expm1(width)
    print(f"80% intervals hold {held.mean():.1%} of rows, median half-width {np.median(widths):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--rows")
    parser.add_argument("--factors", action="store_true")
    args = parser.parse_args()
    runs, reasons = scored(args.path)
    c = columns([run.case for run in runs])
    seconds = np.array([run.seconds for run in runs])
    sources = [run.row["source"] for run in runs]
    print(len(runs), "scored;", dict(reasons))
    weights = source_weights(sources)
    report(sources, errors(c, seconds, NOMINAL), "nominal factors")
    x = fit(c, seconds, weights)
    r = errors(c, seconds, x)
    report(sources, r, "fitted on all")
    studies(runs, r)
    if args.factors:
        for name, value in zip(NAMES, x, strict=True):
            f = FACTORS[name]
            edge = " <" if value <= f.low * 1.001 or value >= f.high * 0.999 else ""
            print(f"    {name:22} {value:10.4g}  [{f.low:g}, {f.high:g}]{edge}")
    if args.rows:
        t = price_step(c, Factors(dict(zip(NAMES, x, strict=True))))
        total = t.total
        for at, (run, one) in enumerate(zip(runs, r, strict=True)):
            if run.row["source"] == args.rows:
                k = run.case
                print(
                    f"  {run.row['row_id'][-3:]} {run.row['gpus']:>5} h{k.width} {k.num_heads} L{k.num_layers} s{k.seq_len} mb{k.microbatch} m{k.num_microbatches} tp{k.tp} pp{k.pp} v{k.vp} dp{k.dp} {run.row['recompute']:8} sp{int(k.sequence_parallel)} {k.precision} a{int(k.program.attention)} n{int(k.program.eager_norm)}  {run.seconds:8.3f}  {np.expm1(one):+.1%} tp {t.tp[at] / total[at]:.2f} bub {t.bubble[at] / total[at]:.2f} sh {t.sharded[at] / total[at]:.2f} dp {t.reduce[at] / total[at]:.2f} up {t.update[at] / total[at]:.2f} {run.row['notes'][:30] if args.rows != 'hagemann2023' else ''}"
                )
    if args.leave_one_out:
        out = np.zeros(len(r))
        for source in set(sources):
            mine = np.array([one == source for one in sources])
            values = fit(c.take(~mine), seconds[~mine], weights[~mine], start=x, rounds=8)
            out[mine] = errors(c.take(mine), seconds[mine], values)
        report(sources, out, "each source by the others")
        intervals(sources, out)


if __name__ == "__main__":
    main()
