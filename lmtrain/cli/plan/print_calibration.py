"""What `lmtrain plan --calibrate` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmtrain.cli.screen.print_facts_and_tables import print_table
from lmtrain.cli.screen.print_messages_and_json import echo, print_json
from lmtrain.cli.shared_options import refuse_unused_overwrite
from lmtrain.observe.screen.metrics_row_text import format_milliseconds
from lmtrain.start.plans.calibrate_on_runs import calibrate_runs, check_hardware_file


def print_calibration(
    arguments: Sequence[str], config_dir: Path | None, out: Path | None, as_json: bool, *, overwrite: bool
) -> None:
    """Fit a machine to the runs that `arguments` name, as `calibrate_runs` does; print the result, as JSON with
    `as_json`.
    """
    refuse_unused_overwrite(overwrite, out, subject="figures that are only printed")
    if out is not None:
        check_hardware_file(out, overwrite=overwrite)
    facts = calibrate_runs(arguments, config_dir, out)
    return print_json(facts) if as_json else _print(facts, out)


def _print(facts: dict[str, Any], out: Path | None) -> None:
    print_table([
        {"<run": row["run"], "step": format_milliseconds(row["measured_step_s"])}
        | {"off before": f"{row['before']:+.1%}", "off after": f"{row['after']:+.1%}"}
        for row in facts["runs"]
    ])  # fmt: skip
    echo(
        f"median {facts['median_before']:.1%} before, {facts['median_after']:.1%} after, where each run is judged by a "
        "fit to the others alone."
    )
    changes = [f"{name} {old:.3g} -> {new:.3g}" for name, (old, new) in facts["figures"].items()]
    echo(f"{facts['hardware']}: {', '.join(changes)}")
    if out is None:
        echo("Nothing is written: --output DIR/hardware/NAME.yaml keeps it.")
    else:
        echo(f"{out} is written. Choose it with --config-dir {out.parent.parent} hardware={out.stem}")
