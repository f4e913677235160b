"""What `lmtrain pretrain -m` prints of a sweep: the run that begins, dry runs beside each other, a table at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lmtrain.cli.inspect.run_folder_view import format_loss
from lmtrain.cli.pretrain.print_dry_run_and_summary import print_plan_facts
from lmtrain.cli.screen.print_facts_and_tables import print_table
from lmtrain.cli.screen.print_messages_and_json import echo, print_json
from lmtrain.start.sweep_runs import SweepViews
from lmtrain.units import format_count


def sweep_views(*, as_json: bool) -> SweepViews:
    """Return what prints a sweep: with `as_json` the results as one line of JSON on stdout, and the rest on stderr."""
    first_facts: dict[str, Any] = {}

    def show_plan(output: str) -> None:
        """Print the facts of a dry run, whose stdout ends with a line of JSON: of the first run all, of others what
        differs from it.
        """
        facts: dict[str, Any] = json.loads(output.splitlines()[-1])
        differing = {key: value for key, value in facts.items() if key not in first_facts or value != first_facts[key]}
        if not first_facts:
            first_facts.update(facts)
            print_plan_facts(facts)
        elif differing.keys() - {"run_folder"}:
            print_plan_facts({key: value for key, value in differing.items() if key != "run_folder"})
        else:
            echo("in numbers as the first one")

    show_results = (lambda rows: print_json({"runs": rows}, indent=None)) if as_json else print_sweep_table
    return SweepViews(lambda line: echo(line, err=as_json), show_plan, show_results)


def print_sweep_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table with a line for each row, as `summarize_run` returns them. If two or more have a validation loss,
    also print the folder of the one with the lowest.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row["settings"]))
    echo()
    print_table([
        {f"<{key}": row["settings"].get(key, "") for key in keys}
        | {"<state": ", ".join(filter(None, (row["state"], row["went_wrong"])))}
        | {"steps": str(row["steps"]), "loss": format_loss(row["loss"])}
        | {"best valid": format_loss(row["best_valid_loss"])}
        | {"tokens/s": "" if row["tokens_per_s"] is None else format_count(row["tokens_per_s"])}
        for row in rows
    ])  # fmt: skip
    best = [row for row in rows if row["best_valid_loss"] is not None]
    if len(best) > 1:
        echo(f"best validation: {min(best, key=lambda row: row['best_valid_loss'])['folder']}")
