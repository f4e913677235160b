"""How far the planner's times are from published runs: errors, intervals and rankings.

    python -m tests.benchmarks.plan_score published_runs.csv [--leave-one-out] [--factors] [--rows SOURCE]
        [--alone SOURCE] [--write]

Fits the factors, without the source that is judged where asked, and prints tables. Skips nothing silently: each row
with a time that is not scored is counted with its reason.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmtrain.plan.cost_model.hardware_figures import TIME_FACTORS, FittedFactors
from lmtrain.plan.cost_model.step_time_and_energy import price_step
from lmtrain.plan.cost_model.training_workload import stack_cases
from tests.benchmarks.plan_fit import Floats, fit, print_factors, root_weights, store
from tests.benchmarks.published_runs import Published, published, read_rows, seconds_of, why_not
from tests.unit.plan.machines import nominal


class Scored:
    """Rows that are priced, with what was published of each."""

    def __init__(self, runs: Sequence[Published]) -> None:
        self.runs = runs
        self.columns = stack_cases([run.case for run in runs])
        self.seconds = np.array([run.seconds for run in runs])
        self.sources = [run.row["source"] for run in runs]
        self.weights = root_weights(self.sources)

    def errors(self, factors: FittedFactors) -> Floats:
        """log(predicted / published)."""
        found: Floats = np.log(price_step(self.columns, factors).total / self.seconds)
        return found

    def fitted(self) -> FittedFactors:
        return fit(self.errors, TIME_FACTORS, self.weights)

    def left_out(self) -> Floats:
        """Each source's errors with factors fitted to the others."""
        found = np.zeros(len(self.runs))
        for source in sorted(set(self.sources)):
            mine = np.array([one == source for one in self.sources])
            others = self.where(~mine)
            found[mine] = self.errors(others.fitted())[mine]
        return found

    def where(self, mine: NDArray[np.bool_]) -> Scored:
        return Scored([run for run, kept in zip(self.runs, mine, strict=True) if kept])


def scored(path: Path) -> tuple[Scored, dict[str, list[str]]]:
    """Rows to price, and by reason the ids of those with a time that are left out."""
    found, reasons = [], defaultdict[str, list[str]](list)
    for row in read_rows(path):
        if not row["iter_time_s"] and not row["tokens_per_s_per_gpu"]:
            continue
        reason = why_not(row) or ("" if seconds_of(row) else "no number of devices")
        if reason:
            reasons[reason].append(row["row_id"])
        else:
            found.append(published(row))
    return Scored(found), reasons


def report(sources: Sequence[str], r: Floats, title: str) -> None:
    e = np.expm1(r)
    print(f"\n{title}: {len(e)} rows, median |error| {np.median(np.abs(e)):.1%}, over 35%: {(np.abs(e) > 0.35).sum()}")
    for source, count in Counter(sources).most_common():
        one = e[np.array(sources) == source]
        middle, bias, worst = np.median(np.abs(one)), np.median(one), np.abs(one).max()
        print(f"  {source:24} {count:4}  median |error| {middle:6.1%}  bias {bias:+6.1%}  worst {worst:6.1%}")


def studies(runs: Sequence[Published], r: Floats) -> None:
    """One model, one machine, one batch: does the planner rank layouts as the measurements do?

    A layout's time is that of its best kernel, and of its best number of heads where a study varies them.
    """
    groups: dict[tuple[str, ...], dict[tuple[object, ...], list[tuple[float, float]]]] = {}
    for run, one in zip(runs, r, strict=True):
        k, row = run.case, run.row
        keys = ("source", "params_B", "layers", "hidden", "hardware", "gpus", "seq_len", "global_batch")
        heads = "" if row["source"] == "bloom_tuning" else row["heads"]
        layout = (k.tp, k.pp, k.vp, k.microbatch, k.sequence_parallel, row["recompute"], k.schedule, k.zero, k.shard)
        group = groups.setdefault((*(row[key] for key in keys), heads), defaultdict(list))
        group[layout].append((run.seconds, run.seconds * float(np.exp(one))))
    print("\nstudies of six layouts or more: rank correlation, and what the chosen layout costs beside the best")
    for name, layouts in sorted(groups.items()):
        if len(layouts) < 6 or len({layout[:2] for layout in layouts}) < 2:
            continue
        true = np.array([min(seconds for seconds, _ in ones) for ones in layouts.values()])
        said = np.array([min(seconds for _, seconds in ones) for ones in layouts.values()])
        grain = 1.0 if name[0] == "bigscience_1b3_v100" else 1e-3  # figures are printed to so many seconds
        rho = np.corrcoef(ranks(true), ranks(np.round(said / grain)))[0, 1]
        loss = true[said.argmin()] / true.min() - 1
        print(f"  {' '.join(name):75} {len(true):3} layouts  rho {rho:.3f}  chosen {loss:+.1%}")


def ranks(values: Floats) -> Floats:
    """Equal values share the mean of their ranks."""
    found = values.argsort().argsort().astype(np.float64)
    for value in set(values.tolist()):
        found[values == value] = found[values == value].mean()
    return found


def intervals(sources: Sequence[str], r: Floats) -> None:
    """80% intervals, each source's width from the errors of the others, of all rows alike."""
    names, held, widths = np.array(sources), np.zeros(len(r), dtype=bool), np.zeros(len(r))
    for source in set(sources):
        mine = names == source
        width = float(np.quantile(np.abs(r[~mine]), 0.8))
        held[mine], widths[mine] = np.abs(r[mine]) <= width, np.expm1(width)
    print(f"80% intervals hold {held.mean():.1%} of rows, median half-width {np.median(widths):.1%}")


def print_rows(rows: Scored, factors: FittedFactors, source: str) -> None:
    """Where each row's seconds go, as shares of the step."""
    step, r = price_step(rows.columns, factors), rows.errors(factors)
    parts = {"tp": step.tp, "bubble": step.bubble, "shard": step.sharded, "dp": step.reduce, "update": step.update}
    for at, run in enumerate(rows.runs):
        k, row = run.case, run.row
        if row["source"] != source:
            continue
        shares = " ".join(f"{name} {float(part[at] / step.total[at]):.2f}" for name, part in parts.items())
        shape = f"h{k.width} a{k.num_heads} L{k.num_layers} s{k.seq_len}"
        layout = (
            f"mb{k.microbatch} m{k.num_microbatches} tp{k.tp} pp{k.pp} v{k.vp} dp{k.dp} sp{int(k.sequence_parallel)}"
        )
        kind = f"{row['recompute']:9} {k.precision:8} {k.program.attention.name}"
        print(f"  {row['row_id'][-3:]} {shape} {layout} {kind} {run.seconds:8.3f} {np.expm1(r[at]):+.1%}  {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--rows")
    parser.add_argument("--alone", help="a source to fit to and to judge, without the others: how far the words can go")
    parser.add_argument("--factors", action="store_true")
    parser.add_argument("--write", action="store_true", help="keep what is fitted in the planner")
    args = parser.parse_args()
    rows, reasons = scored(args.path)
    print(len(rows.runs), "rows scored; with a time, but left out:")
    for reason, names in reasons.items():
        print(f"  {len(names)} {reason}: {' '.join(names)}")
    report(rows.sources, rows.errors(nominal()), "nominal factors")
    factors = rows.fitted()
    r = rows.errors(factors)
    report(rows.sources, r, "fitted on all")
    studies(rows.runs, r)
    if args.write:
        store("time", factors.values)
    if args.factors:
        print_factors(factors, TIME_FACTORS)
    if args.rows:
        print_rows(rows, factors, args.rows)
    if args.alone:
        alone = rows.where(np.array([source == args.alone for source in rows.sources]))
        r = alone.errors(alone.fitted())
        report(alone.sources, r, "fitted to it alone")
        studies(alone.runs, r)
    if args.leave_one_out:
        r = rows.left_out()
        report(rows.sources, r, "each source by the others")
        intervals(rows.sources, r)
        if args.write:
            store("interval", float(np.expm1(np.quantile(np.abs(r), 0.8))))


if __name__ == "__main__":
    main()
