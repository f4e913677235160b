"""`lmtrain trace RUN`: show and export what every rank of a run did when, and where a step's time went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmtrain.cli.screen.print_messages_and_json import print_json
from lmtrain.cli.shared_options import (
    Json,
    Overwrite,
    Plugins,
    check_output_file,
    parse_output_file,
    refuse_unused_overwrite,
)
from lmtrain.runfolder.file_names import TRACES

EXAMPLES = (
    ("lmtrain trace runs/a", "tables of a step, and a file for ui.perfetto.dev"),
    ("lmtrain trace runs/a --step 12 --output step.json.gz", "the critical path of step 12"),
)


def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder; the run may still go on.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--output", "--out", metavar="FILE", parser=parse_output_file,
            help="File for the trace that ui.perfetto.dev opens; compressed if its name ends in .gz. "
            "[default: RUN/trace/trace.json; with --json none]",
        ),
    ] = None,
    start: Annotated[
        int | None, typer.Option(metavar="N", help="Show this start of the run, from 1. [default: the newest]")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Show the critical path and timeline of this step. [default: the median one]"),
    ] = None,
    overwrite: Overwrite = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Show where the time of a run's steps went, from the spans that observe.trace or `touch RUN/TRACE` recorded."""
    from lmtrain.cli.trace.print_trace import print_trace
    from lmtrain.observe.timeline.merge_ranks import merge_traces
    from lmtrain.observe.timeline.perfetto_export import TRACE_FILE, write_trace
    from lmtrain.start.facts_of_outputs.facts_of_trace import trace_facts

    refuse_unused_overwrite(overwrite, out, subject="the default file, which is replaced if it is a trace")
    path = out if out is not None or as_json else run / TRACES / "trace.json"
    if path is not None:
        check_output_file("--output", path, TRACE_FILE, overwrite=overwrite, is_default=out is None)
    timeline = merge_traces(run)
    facts, rows = trace_facts(timeline, start, step)
    if path is not None:
        write_trace(timeline, path)
    facts |= {"file": None if path is None else str(path)}
    return print_json(facts) if as_json else print_trace(facts, rows)
