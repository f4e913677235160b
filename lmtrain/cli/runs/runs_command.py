"""`lmtrain runs`: list the runs of a folder, compare two runs, plot runs in the terminal. Torch-free.

`lmtrain runs FOLDER` is `lmtrain runs list FOLDER`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lmtrain.cli.inspect.run_folder_view import ago, format_loss
from lmtrain.cli.screen.print_messages_and_json import print_json
from lmtrain.cli.shared_options import Json
from lmtrain.cli.subcommands import PlainGroup, examples_epilog
from lmtrain.config.settings_base import show
from lmtrain.errors import UsageError, join_few, spelling_hint, way
from lmtrain.runfolder.folder_reader import RunFolder, read_runs_below
from lmtrain.runfolder.lineage import MERGED, WEIGHTS
from lmtrain.runfolder.metrics_rows import to_json_data
from lmtrain.runfolder.settings_differences import flatten
from lmtrain.start.other_tools.verb_synonyms import explain_absent
from lmtrain.train.record.facts_of_recorded_runs import row_of_run
from lmtrain.units import format_count

EXAMPLES = (
    ("lmtrain runs", "the runs below ./runs, or below this folder"),
    ("lmtrain runs list runs --state failed --where optim.lr=3e-4", "some of them"),
    ("lmtrain runs --tree", "branches below the runs from which they began"),
    ("lmtrain runs diff runs/a runs/b", "where two runs part, and why"),
    ("lmtrain runs plot runs/a runs/b --key grad_norm --log", "curves in the terminal"),
)
_STATES = ("running", "finished", "stopped", "failed", "killed", "out of sight")
_STYLES = {"running": "green", "failed": "bold red", "killed": "red", "stopped": "yellow"}
_BEGINNINGS = {WEIGHTS: " (weights)", MERGED: " (merge)"}  # behind the step of a checkpoint, by the kind of parent
_WHY_STOPPED = "why stopped"
_TEXT_COLUMNS = ("run", "state", "stage", _WHY_STOPPED)  # columns of words, left-aligned
_DROPPED_FIRST = ("tokens/s", "%", "last row", _WHY_STOPPED, "stage", "valid")  # left out first if a terminal is narrow
_MAIN_COLUMNS = ("state", "step", "loss", "valid")  # a long name is shortened to make room for them,
_MIN_NAME_WIDTH = 12  # but not below this width
_MIN_REASON_WIDTH = 12  # the width kept for the reason of a stop


class _ListByDefault(PlainGroup):
    """A command group that reads a first argument which is no command as a folder for `list`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or not (args[0] in self.commands or args[0] in ("-h", "--help")):
            args = ["list", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(cls=_ListByDefault, rich_markup_mode="markdown", epilog=examples_epilog(EXAMPLES))


@app.command(name="list")
def list_runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FOLDER", help="Folders to search, with subfolders. [default: runs, or this folder]"),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="STATE", help="Only running, finished, stopped, failed or killed ones. Repeatable."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Only those with this setting, such as optim.lr=3e-4. Repeatable."),
    ] = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="Show each branch below the run from which it began, also if that is gone.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the runs below a folder: state, step, loss, speed over the last 50 steps, time of the last row, and why they
    stopped.
    """
    rows = select_rows(folders or [], state or [], where or [])
    if tree:
        from lmtrain.start.facts_of_outputs.family_of_runs import family_rows

        rows = family_rows(rows, row_of_run, with_merges=not (state or where))
    return print_json(rows) if as_json else print_runs(rows)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="The folder of a run.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The folder of another run.")],
    as_json: Json = False,
) -> None:
    """Compare two runs: the settings and programs that differ, and the first step at which data, loss or gradient norm
    do.

    Rows of metrics.jsonl hold numbers in full, so equal means equal bit for bit. The cause is found from what both runs
    have recorded: settings, versions, the samples and the text of each row, the first weights and checkpoints.
    """
    from lmtrain.cli.runs.print_difference import diff_lines
    from lmtrain.start.facts_of_outputs.compare_runs import diff_facts

    facts = diff_facts(a, b)
    if as_json:
        return print_json(to_json_data(facts), allow_nan=False)
    from lmtrain.cli.screen.print_facts_and_tables import print_facts

    return print_facts("two runs compared", diff_lines(facts))


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs, or a sweep's.")],
    key: Annotated[str, typer.Option(metavar="KEY", help="A number in the step rows of metrics.jsonl.")] = "loss",
    by: Annotated[str, typer.Option(metavar="AXIS", help="The x axis: step, tokens or seconds.")] = "step",
    log: Annotated[bool, typer.Option("--log", help="Use a logarithmic y axis.")] = False,
    height: Annotated[int, typer.Option(min=4, max=200, help="Height of the plot in lines.")] = 18,
) -> None:
    """Plot a number that runs recorded, such as loss or tokens_per_s, in the terminal, as wide as the terminal is."""
    from lmtrain.cli.runs.plot_command import plot_runs

    plot_runs(runs, key, by, log, height)


def _instead(option: str, values: Sequence[str], wrong: str, right: str, shown: str | None = None) -> str:
    """Return the words to type, with all values of a repeatable option, in which the value `right` replaces `wrong`.
    """
    words = [f"{option}={right if value == wrong else value}" for value in values]
    return way(*words, instead_of=option, shown=shown or right)


def select_rows(folders: Sequence[Path], states: Sequence[str], where: Sequence[str]) -> list[dict[str, Any]]:
    """Return a dict of facts, by `row_of_run`, for each run below the folders that is in one of `states` (empty: any)
    and has every setting "KEY=VALUE" of `where`. Without folders, search `runs` or the current folder. Raise UsageError
    on an unknown state or key, MissingInputError if a folder holds no runs.
    """
    if wrong := [state for state in states if state not in _STATES]:
        hint = spelling_hint(wrong[0], _STATES, lambda state: _instead("--state", states, wrong[0], state))
        raise UsageError(f"--state={wrong[0]} is not a state of a run. {hint}")
    conditions = [text.partition("=") for text in where]
    for text, (key, sign, _) in zip(where, conditions, strict=True):
        if not (key and sign):
            raise UsageError(f"--where={text} has no value. Give KEY=VALUE.")
    for folder in folders:
        if not folder.exists() and (said := explain_absent(str(folder))):
            raise UsageError(f"lmtrain runs {folder} is not a command. {said}")
    folders = folders or [Path("runs") if Path("runs").is_dir() else Path()]
    runs = read_runs_below(folders)
    known_keys = {key for run in runs for key, _ in flatten(run.settings)}
    if unknown := next((text for text in where if text.partition("=")[0] not in known_keys), None):
        key, _, value = unknown.partition("=")
        meant = min((known for known in known_keys if known.endswith(f".{key}")), default=key)
        hint = spelling_hint(
            meant, known_keys, lambda known: _instead("--where", where, unknown, f"{known}={value}", known)
        )
        raise UsageError(f"--where={key} does not name a setting of any run in {join_few(map(str, folders))}. {hint}")
    rows = [row_of_run(run) for run in runs if all(_has_setting(run, key, value) for key, _, value in conditions)]
    return [row for row in rows if not states or row["state"] in states]


def _has_setting(run: RunFolder, key: str, value: str) -> bool:
    """Return True if the run's setting `key`, such as "optim.lr", has this value. Numbers are compared as numbers, so
    "1e-3" equals 0.001; other values as text.
    """
    setting = dict(flatten(run.settings)).get(key)
    if type(setting) in (int, float):
        try:
            return float(value.replace("_", "")) == setting
        except ValueError:
            return False
    return value in (show(setting), str(setting))


def print_runs(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table with a line for each run, from the rows of `select_rows` or `family_rows`. A narrow terminal does
    not get the least important columns. If there are no rows, say so.
    """
    from rich.cells import cell_len
    from rich.text import Text

    from lmtrain.cli.screen.print_facts_and_tables import PlainConsole

    screen = PlainConsole(highlight=False)
    if not rows:
        screen.print("no run is of that kind")
        return
    cells = [_table_cells(row) for row in rows]
    columns = [column for column in cells[0] if column == "run" or any(row_cells[column] for row_cells in cells)]
    widths = {column: max(len(column), *(cell_len(row_cells[column]) for row_cells in cells)) for column in columns}
    fixed = screen.width - _MIN_REASON_WIDTH
    # because: the state is the purpose of the table, and the end of a long name distinguishes it from others
    name_width = max(fixed - 2 - sum(widths.get(column, -2) + 2 for column in _MAIN_COLUMNS), _MIN_NAME_WIDTH)
    if screen.is_terminal and widths["run"] > name_width:
        widths["run"] = name_width
        for row_cells in cells:
            indent = row_cells["run"][: len(row_cells["run"]) - len(row_cells["run"].lstrip(" "))][: name_width // 2]
            row_cells["run"] = indent + _shorten_to_end(row_cells["run"].lstrip(" "), name_width - len(indent))
    for column in _DROPPED_FIRST if screen.is_terminal else ():
        if sum(widths.values()) - widths.get(_WHY_STOPPED, 0) + 2 * len(widths) > fixed:
            widths.pop(column, None)
    for number, row in enumerate([dict(zip(columns, columns, strict=True)), *cells]):
        line = Text(style="bold" if number == 0 else "")
        for column, width in widths.items():
            space = " " * (width - cell_len(row[column]))  # because: a character may be two columns wide
            cell = row[column] + space if column in _TEXT_COLUMNS else space + row[column]
            line.append(f"{cell}  ", style=_STYLES.get(row[column], "") if column == "state" else "")
        line.rstrip()
        if screen.is_terminal:
            line.truncate(screen.width, overflow="ellipsis")
        screen.print(line, soft_wrap=True)


def _shorten_to_end(name: str, width: int) -> str:
    """Return the end of `name` that fits into `width` terminal columns, with "…" before it; a name that fits is
    returned unchanged.
    """
    from rich.cells import cell_len

    start = 0
    while cell_len(name[start:]) > width - (start > 0):
        start += 1
    return "…" * (start > 0) + name[start:]


def _table_cells(row: dict[str, Any]) -> dict[str, str]:
    """Return the texts of a run's line in the table, as column title -> text, from its row by `row_of_run` or
    `family_rows`.
    """
    return {
        "run": "  " * row.get("depth", 0) + row["name"], "from step": _describe_branch_point(row),
        "state": row["state"], "stage": row["stage"] or "", "step": "" if row["step"] is None else f"{row['step']:,}",
        "%": f"{row['step'] / row['steps']:.0%}" if row["steps"] else "",
        "loss": format_loss(row["loss"]), "valid": format_loss(row["loss/valid"]),
        "tokens/s": "" if row["tokens_per_s"] is None else format_count(row["tokens_per_s"]),
        "last row": _ago_or_empty(row["last_row"]), _WHY_STOPPED: row["why"].split("\n")[0],
    }  # fmt: skip


def _describe_branch_point(row: dict[str, Any]) -> str:
    """Return the step of the checkpoint from which a run began, as `family_rows` found it; empty for other rows."""
    step = row.get("branch_step")
    return "" if step is None else f"{step:,}{_BEGINNINGS.get(row['begins_with'], '')}"


def _ago_or_empty(time: str | None) -> str:
    """Return the time that has passed since `time`, an ISO timestamp, as in "5m03s ago"; "" if it is None or malformed.
    """
    try:
        return ago(time or "")
    except (TypeError, ValueError):
        return ""
