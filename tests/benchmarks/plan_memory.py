"""How far the planner's memory is from published runs: bytes, and who ran out of memory.

python -m tests.benchmarks.plan_memory published_runs.csv [--leave-one-out] [--rows SOURCE] [--write]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmtrain.plan.cost_model.hardware_figures import MEMORY_FACTORS, FittedFactors
from lmtrain.plan.cost_model.training_workload import stack_cases
from lmtrain.plan.run_estimates.closed_form_memory import GIB, RankMemory, price_memory
from tests.benchmarks.plan_fit import Floats, fit, print_factors, root_weights, store
from tests.benchmarks.published_runs import PROGRAMS, Row, build_case, read_rows, why_not

MEASURED, FITS, OUT = 0, 1, 2
MARGIN = 0.02  # of rows that fit or did not: how far on the right side they should be


def kind_of(row: Row) -> int | None:
    """A row without a figure counts where its study says which layouts did not fit."""
    if row["mem_GB"]:
        return MEASURED
    if row["metric"] == "fits_in_memory":
        return OUT if row["value"].startswith("OOM") else None  # others had no kernel
    return FITS if row["source"] == "hagemann2023" else None


def measured_bytes(row: Row) -> float:
    """The column says GB; only one source's figure is not what a tool printed in GiB."""
    return float(row["mem_GB"] or 0) * (1e9 if row["source"] == "mcore_ci_7b" else GIB)


class Rows:
    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.columns = stack_cases([build_case(row) for row in self.rows])
        self.kinds = np.array([kind_of(row) for row in self.rows])
        measured = np.array([measured_bytes(row) for row in self.rows])
        self.true = np.where(self.kinds == MEASURED, measured, self.columns.memory_bytes)
        self.sources = np.array([row["source"] for row in self.rows])

    def fitted(self) -> FittedFactors:
        groups = list(zip(self.sources.tolist(), self.kinds.tolist(), strict=True))
        return fit(self.residuals, MEMORY_FACTORS, root_weights(groups))

    def left_out(self) -> tuple[Floats, Floats]:
        """Errors and calls of each source with factors fitted to the others."""
        errors, right = np.zeros(len(self.rows)), np.zeros(len(self.rows))
        for source in sorted(set(self.sources.tolist())):
            mine = self.sources == source
            factors = Rows([row for row in self.rows if row["source"] != source]).fitted()
            errors[mine], right[mine] = self.errors(factors)[mine], self.right(factors)[mine]
        return errors, right

    def errors(self, factors: FittedFactors) -> Floats:
        found: Floats = np.log(price_memory(self.columns, factors).total / self.true)
        return found

    def residuals(self, factors: FittedFactors) -> Floats:
        """Of rows that fit or did not, only how far they are on the wrong side."""
        r = self.errors(factors)
        wrong = np.where(self.kinds == FITS, np.maximum(r + MARGIN, 0), np.minimum(r - MARGIN, 0))
        return np.where(self.kinds == MEASURED, r, wrong)

    def right(self, factors: FittedFactors) -> Floats:
        """1 where it is called right whether a row fits."""
        return np.where(self.kinds == OUT, self.errors(factors) > 0, self.errors(factors) < 0).astype(np.float64)


def chosen(path: Path) -> tuple[Rows, Counter[str]]:
    """Rows with a figure, or that fit or did not, and how many are left out for which reason."""
    found, reasons = [], Counter[str]()
    for row in read_rows(path):
        if kind_of(row) is None or row["source"] not in PROGRAMS:
            continue
        reason = why_not(row)
        reasons[reason] += 1
        if not reason:
            found.append(row)
    del reasons[""]
    return Rows(found), reasons


def report(rows: Rows, errors: Floats, right: Floats, title: str) -> None:
    print(f"\n{title}")
    e = np.expm1(errors)

    def said(mine: NDArray[np.bool_], kind: int) -> str:
        if kind != MEASURED:
            return f"{right[mine].mean():.1%} called right"
        return f"median |error| {np.median(np.abs(e[mine])):.1%}, bias {np.median(e[mine]):+.1%}"

    for kind, name in ((MEASURED, "measured"), (FITS, "fit"), (OUT, "ran out of memory")):
        mine = rows.kinds == kind
        for source in sorted(set(rows.sources[mine])):
            one = mine & (rows.sources == source)
            print(f"  {source:22} {one.sum():4} {name}: {said(one, kind)}, worst {np.abs(e[one]).max():.0%}")
        print(f"{name}: {mine.sum()} rows, {said(mine, kind)}")


def print_rows(rows: Rows, factors: FittedFactors, source: str) -> None:
    """Each measured row, and those that were called wrong."""
    memory, right = price_memory(rows.columns, factors), rows.right(factors)
    for at, row in enumerate(rows.rows):
        if row["source"] != source or (rows.kinds[at] != MEASURED and right[at]):
            continue
        parts = " ".join(f"{one.name} {getattr(memory, one.name)[at] / GIB:.1f}" for one in fields(RankMemory))
        layout = f"mb{row['micro_batch']} tp{row['tp']} pp{row['pp']} v{rows.columns.vp[at]:g} {row['recompute']}"
        shape = f"h{row['hidden']} L{row['layers']} s{row['seq_len']}"
        true, said = rows.true[at] / GIB, memory.total[at] / GIB
        print(f"  {row['row_id'][-3:]} kind {rows.kinds[at]} {shape} {layout} true {true:.1f} said {said:.1f}: {parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--rows")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows, reasons = chosen(args.path)
    print(len(rows.rows), "rows; left out:", dict(reasons))
    factors = rows.fitted()
    print_factors(factors, MEMORY_FACTORS)
    report(rows, rows.errors(factors), rows.right(factors), "fitted on all")
    if args.write:
        store("memory", factors.values)
    if args.rows:
        print_rows(rows, factors, args.rows)
    if args.leave_one_out:
        report(rows, *rows.left_out(), "each source by the others")


if __name__ == "__main__":
    main()
