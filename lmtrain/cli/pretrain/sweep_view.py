"""What the runs of a sweep would be, and how they stand by their records: a table for people, rows for scripts.

Called by sweep.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from lmtrain.cli.inspect.run_view import as_written
from lmtrain.cli.pretrain.summary import print_plan
from lmtrain.cli.screen.console import Screen
from lmtrain.errors import LmtrainError
from lmtrain.observe.metrics import read_metrics
from lmtrain.units import format_count


def summary(folder: Path, changed: dict[str, str], state: str) -> dict[str, Any]:
    """One run: what sets it apart, its state, and the figures of its metrics.jsonl, null where there are none yet."""
    try:
        rows = read_metrics(folder / "metrics.jsonl")
    except LmtrainError:
        rows = []
    with as_written(folder):
        return _figures(folder, changed, state, rows)


def _figures(folder: Path, changed: dict[str, str], state: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    steps = [row for row in rows if row["event"] == "step"]
    valid = [row["loss"] for row in rows if row["event"] == "valid" and row.get("loss") is not None]
    speeds = [row["tokens_per_s"] for row in steps if row.get("tokens_per_s") is not None]
    return {
        "folder": str(folder), "settings": changed, "state": state,
        "steps": steps[-1]["step"] if steps else 0, "loss": _number(steps[-1]["loss"]) if steps else None,
        "best_valid_loss": _number(min(valid)) if valid else None,
        "tokens_per_s": median(speeds) if speeds else None,
    }  # fmt: skip


def print_plans(said: str, first: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a run would be, as --dry-run says it for a program: all of the first, of another what sets it apart."""
    if not said:
        return first
    facts: dict[str, Any] = json.loads(said.splitlines()[-1])
    if first is None:
        print_plan(facts)
        return facts
    other = {key: value for key, value in facts.items() if key not in first or value != first[key]}
    other.pop("run_folder", None)
    if other:
        print_plan(other)
    else:
        Screen(highlight=False).print("in numbers as the first one")
    return first


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """A line for each run, in the order in which they ran, and the folder of the best."""
    keys = list(dict.fromkeys(key for row in rows for key in row["settings"]))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in (*keys, "state"):
        table.add_column(title, overflow="fold")
    for title in ("steps", "loss", "best valid", "tokens/s"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            *(Text(row["settings"].get(key, "")) for key in keys), row["state"], str(row["steps"]),
            _four(row["loss"]), _four(row["best_valid_loss"]),
            "" if row["tokens_per_s"] is None else format_count(row["tokens_per_s"]),
        )  # fmt: skip
    console = Screen(highlight=False)
    console.print()
    console.print(table)
    best = [row for row in rows if row["best_valid_loss"] is not None]
    if len(best) > 1:
        first = min(best, key=lambda row: row["best_valid_loss"])
        console.print(Text(f"best validation: {first['folder']}"), soft_wrap=True)


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _four(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
