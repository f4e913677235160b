"""`lmtrain runs`: the runs of a folder in a table, two of them compared, some of them drawn. Torch-free.

`lmtrain runs FOLDER` is `lmtrain runs list FOLDER`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lmtrain.cli.inspect.run_view import ago, finite, four
from lmtrain.cli.options import Json
from lmtrain.cli.screen.terminal import print_json
from lmtrain.cli.verbs import PlainGroup, examples_epilog
from lmtrain.config.base import show
from lmtrain.errors import MissingInputError, UsageError, join_few, spelling_hint
from lmtrain.runfolder.differences import flatten
from lmtrain.runfolder.folder import RunFolder, expand_runs, find_runs, read_runs
from lmtrain.runfolder.rows import last_write_time, loss_warning, read_first_step, read_last_rows, to_json_data
from lmtrain.units import format_count

EXAMPLES = (
    ("lmtrain runs", "the runs below ./runs, or below this folder"),
    ("lmtrain runs list runs --state failed --where optim.lr=3e-4", "some of them"),
    ("lmtrain runs diff runs/a runs/b", "where two runs part, and why"),
    ("lmtrain runs plot runs/a runs/b --key grad_norm --log", "curves in the terminal"),
)
_STATES = ("running", "finished", "stopped", "failed", "killed", "out of sight")
_STYLES = {"running": "green", "failed": "bold red", "killed": "red", "stopped": "yellow"}
_LAST = "why stopped"
_WORDS = ("run", "state", _LAST)  # the columns that are no numbers
_LEAST_FIRST = ("tokens/s", "%", "last row", _LAST, "valid")  # what a narrow terminal goes without
_KEPT = ("state", "step", "loss", "valid")  # for which a long name gives way,
_LEAST_NAME = 12  # down to so many letters
_LAST_ROOM = 12  # of why a run stopped at least its beginning


class _ListFirst(PlainGroup):
    """What is no verb of this group is a folder to list."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or not (args[0] in self.commands or args[0] in ("-h", "--help")):
            args = ["list", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(cls=_ListFirst, rich_markup_mode="markdown", epilog=examples_epilog(EXAMPLES))


@app.command(name="list")
def list_runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FOLDER", help="Where to look, also inside. [default: runs, or this folder]"),
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
    rows = rows_of(folders or [], state or [], where or [])
    return print_json(rows) if as_json else print_runs(rows)


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

    facts = diff_facts(a, b)
    if as_json:
        return print_json(to_json_data(facts), allow_nan=False)
    from lmtrain.cli.screen.console import print_facts

    return print_facts("two runs compared", diff_lines(facts))


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs, or a sweep's.")],
    key: Annotated[str, typer.Option(metavar="KEY", help="A number of step rows, as metrics.jsonl calls it.")] = "loss",
    by: Annotated[str, typer.Option(metavar="AXIS", help="Over step, tokens or seconds.")] = "step",
    log: Annotated[bool, typer.Option("--log", help="On a logarithmic scale.")] = False,
    height: Annotated[int, typer.Option(min=4, max=200, help="Lines of the picture.")] = 18,
) -> None:
    """Draw a number of one or more runs in the terminal, as wide as it is. Extremes are kept."""
    from lmtrain.cli.runs.plot import plot_runs

    plot_runs(runs, key, by, log, height)


def rows_of(folders: Sequence[Path], states: Sequence[str], where: Sequence[str]) -> list[dict[str, Any]]:
    if wrong := [state for state in states if state not in _STATES]:
        raise UsageError(f"--state={wrong[0]} is no state of a run. {spelling_hint(wrong[0], _STATES)}")
    wanted = [text.partition("=") for text in where]
    for text, (key, sign, _) in zip(where, wanted, strict=True):
        if not (key and sign):
            raise UsageError(f"--where={text} names no value. Write KEY=VALUE, as in --where optim.lr=3e-4.")
    folders = folders or [Path("runs") if Path("runs").is_dir() else Path()]
    if empty := next((one for one in folders if next(find_runs(one), None) is None), None):
        why = "holds no run" if empty.is_dir() else "is no folder"
        raise MissingInputError(f"{empty} {why}. Name a folder in which `lmtrain pretrain` has written runs.")
    seen = read_runs(expand_runs(folders))
    for one in seen if len(folders) == 1 else ():  # so that a run of a sweep has its sweep's name
        one.name = str(one.path.relative_to(folders[0])) if one.path != folders[0] else one.name
    known = {key for one in seen for key, _ in flatten(one.settings)}
    for key, _, _ in wanted:
        if key not in known:
            there = join_few(map(str, folders))
            raise UsageError(f"--where={key} is a setting that no run in {there} has. {spelling_hint(key, known)}")
    rows = [_row(one) for one in seen if all(_has(one, key, value) for key, _, value in wanted)]
    return [row for row in rows if not states or row["state"] in states]


def _has(seen: RunFolder, key: str, value: str) -> bool:
    found = dict(flatten(seen.settings)).get(key)
    if type(found) in (int, float):
        try:
            return float(value.replace("_", "")) == found
        except ValueError:
            return False
    return value in (show(found), str(found))


def _row(seen: RunFolder) -> dict[str, Any]:
    rows = read_last_rows(seen.metrics)
    steps = [row for row in rows if row["event"] == "step"]
    last, valid = steps[-1] if steps else {}, [row for row in rows if row["event"] == "valid"]
    total = seen.settings.get("train", {})
    wrong = loss_warning(read_first_step(seen.metrics), last) if seen.state == "finished" else ""
    return {
        "run": str(seen.path), "name": seen.name, "state": seen.state, "step": finite(last.get("step")) or 0,
        "steps": finite(total.get("steps")) if isinstance(total, dict) else None,
        "loss": _loss(last), "valid_loss": _loss(valid[-1]) if valid else None,
        "tokens_per_s": finite(last.get("tokens_per_s")), "tokens": finite(last.get("tokens")),
        "last_row": last_write_time(rows, seen.metrics), "why": seen.end_reason or wrong, "missing": seen.problems,
    }  # fmt: skip


def _loss(row: dict[str, Any]) -> float | str | None:
    """NaN and infinities as metrics.jsonl has them: a run that came to one must not look like one without a loss."""
    value = row.get("loss")
    return to_json_data(value) if type(value) in (int, float) else None


def print_runs(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each run; on a terminal the columns that matter least are left out if they do not fit."""
    from rich.cells import cell_len
    from rich.text import Text

    from lmtrain.cli.screen.console import PlainConsole

    screen = PlainConsole(highlight=False)
    if not rows:
        screen.print("no run is of that kind")
        return
    cells = [_cells(row) for row in rows]
    titles = [title for title in cells[0] if title == "run" or any(one[title] for one in cells)]
    widths = {title: max(len(title), *(cell_len(one[title]) for one in cells)) for title in titles}
    fixed = screen.width - _LAST_ROOM
    # because: how runs stand is what the table is for, and the end of a long name tells it from others
    room = max(fixed - 2 - sum(widths.get(title, -2) + 2 for title in _KEPT), _LEAST_NAME)
    if screen.is_terminal and widths["run"] > room:
        widths["run"] = room
        for one in cells:
            one["run"] = _end_of(one["run"], room)
    while screen.is_terminal and sum(widths.values()) - widths.get(_LAST, 0) + 2 * len(widths) > fixed:
        if not (least := next((title for title in _LEAST_FIRST if title in widths), None)):
            break
        del widths[least]
    for number, row in enumerate([dict(zip(titles, titles, strict=True)), *cells]):
        line = Text(style="bold" if number == 0 else "")
        for title, width in widths.items():
            space = " " * (width - cell_len(row[title]))  # because: a letter may be two places wide
            said = row[title] + space if title in _WORDS else space + row[title]
            line.append(f"{said}  ", style=_STYLES.get(row[title], "") if title == "state" else "")
        line.rstrip()
        if screen.is_terminal:
            line.truncate(screen.width, overflow="ellipsis")
        screen.print(line, soft_wrap=True)


def _end_of(name: str, width: int) -> str:
    from rich.cells import cell_len

    begin = 0
    while cell_len(name[begin:]) > width - (begin > 0):
        begin += 1
    return "…" * (begin > 0) + name[begin:]


def _cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "run": row["name"], "state": row["state"], "step": f"{row['step']:,}",
        "%": f"{row['step'] / row['steps']:.0%}" if row["steps"] else "",
        "loss": four(row["loss"]), "valid": four(row["valid_loss"]),
        "tokens/s": "" if row["tokens_per_s"] is None else format_count(row["tokens_per_s"]),
        "last row": _ago(row["last_row"]), _LAST: row["why"].split("\n")[0],
    }  # fmt: skip


def _ago(time: str | None) -> str:
    try:
        return ago(time or "")
    except (TypeError, ValueError):
        return ""
