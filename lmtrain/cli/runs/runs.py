"""`lmtrain runs`: the runs of a folder in a table, two of them compared, some of them drawn. Torch-free.

`lmtrain runs FOLDER` is `lmtrain runs list FOLDER`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lmtrain.cli.options import Json
from lmtrain.cli.plain_help import PlainGroup, examples
from lmtrain.cli.screen.terminal import echo

EXAMPLES = (
    ("lmtrain runs", "the runs below ./runs, or below this folder"),
    ("lmtrain runs list runs --state failed --where optim.lr=3e-4", "some of them"),
    ("lmtrain runs diff runs/a runs/b", "where two runs part, and why"),
    ("lmtrain runs plot runs/a runs/b --key grad_norm --log", "curves in the terminal"),
)


class _ListFirst(PlainGroup):
    """What is no verb of this group is a folder to list."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or not (args[0] in self.commands or args[0] in ("-h", "--help")):
            args = ["list", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(cls=_ListFirst, rich_markup_mode="markdown", epilog=examples(EXAMPLES))


@app.command(name="list")
def list_runs(
    folder: Annotated[
        Path | None, typer.Argument(help="Where to look, also in folders inside. [default: runs, or this folder]")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="STATE", help="Only running, finished, stopped, failed or killed ones. Repeatable."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Only those with this setting, such as optim.lr=3e-4. Repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the runs of a folder: state, step, loss, speed, when they last wrote, and why they stopped."""
    from lmtrain.cli.runs.table import print_table, rows_of

    rows = rows_of(folder, state or [], where or [])
    if as_json:
        return echo(json.dumps(rows, indent=1))
    return print_table(rows)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="The folder of a run.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The folder of another.")],
    as_json: Json = False,
) -> None:
    """Say what differs between two runs: settings, programs, and the first step at which data, loss or norm do.

    Rows of metrics.jsonl hold numbers in full, so equal means equal bit for bit. The cause is named from what both
    have recorded: settings, versions, the samples and the text of each row, the first weights and checkpoints.
    """
    from lmtrain.cli.runs.diff import diff_facts, diff_lines
    from lmtrain.cli.screen.console import Screen
    from lmtrain.cli.screen.fact_list import print_facts
    from lmtrain.observe.metrics import writable

    facts = diff_facts(a, b)
    if as_json:
        return echo(json.dumps(writable(facts), indent=1, allow_nan=False))
    return print_facts(Screen(highlight=False), "two runs compared", [*diff_lines(facts)])


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.")],
    key: Annotated[str, typer.Option(metavar="KEY", help="A number of step rows, as metrics.jsonl calls it.")] = "loss",
    by: Annotated[str, typer.Option(metavar="AXIS", help="Over step, tokens or seconds.")] = "step",
    log: Annotated[bool, typer.Option("--log", help="On a logarithmic scale.")] = False,
    height: Annotated[int, typer.Option(min=4, max=200, help="Lines of the picture.")] = 18,
) -> None:
    """Draw a number of one or more runs in the terminal, as wide as it is. Extremes are kept."""
    from lmtrain.cli.runs.plot import plot_runs

    plot_runs([*{path.resolve(): path for path in runs}.values()], key, by, log, height)
