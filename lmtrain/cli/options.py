"""Options and arguments that several verbs take, and the sizes that they may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lmtrain.cli.keys.completion import complete_override
from lmtrain.cli.screen.terminal import tell
from lmtrain.errors import OutputError, UsageError, join_few
from lmtrain.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from data_tools.read.sources import Inputs


def _add(names: list[str] | None) -> list[str] | None:
    from lmtrain.config.base import add_plugin

    for name in names or ():
        add_plugin(name)
    return names


Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin", metavar="PACKAGE", callback=_add,
        help="Import this package, and let its models, optimizers, schedules and tasks be chosen too. Repeatable.",
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", autocompletion=complete_override,
        help="Settings: key=value, or group=choice as in model=gpt2_small. `lmtrain config list` shows the groups.",
    ),
]  # fmt: skip
ConfigDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="A folder of your own configs; it wins over conf/.")
]
ConfigName = Annotated[str, typer.Option(metavar="NAME", help="The root config to start from.")]
FromRun = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Take the settings of this run: to go on with it, or with another run.dir to branch off from its newest "
        "checkpoint, or from the checkpoint given here.",
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")]
Precision = Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="In which numbers to compute.")]
TextInputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT",
        help="Files (.txt .jsonl .parquet; also .gz .bz2 .xz .zst), folders of them, globs, or - for standard input.",
    ),
]
InputFormat = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="NAME",
        help="What standard input holds, or a file whose name does not say it: txt, jsonl, or one compressed, as in "
        "txt.gz. [default: jsonl]",
    ),
]


def written_file(text: str) -> Path:
    """Return the path of a file to be written; refuse a folder, whose name would be given to files beside it."""
    if text.endswith("/") or Path(text).is_dir():
        raise typer.BadParameter(f"it is a folder. Add a name for what goes into it, as in {Path(text) / 'NAME'}.")
    return Path(text)


def counted(text: str) -> int:
    """Return a count that was typed as in settings: 4000 or 4k."""
    try:
        return parse_count(text)
    except ValueError as error:
        raise typer.BadParameter(f"it {error}. Use 4000 or 4k.") from error


def parse_size(option: str, text: str, parse: Callable[[str], int] = parse_bytes) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option} {text} {error}.") from error


def refuse_unfit(context: typer.Context, unfit: set[str], beside: str) -> None:
    """Refuse the first of these parameters that was given and would be ignored."""
    for one in context.command.params:
        source = context.get_parameter_source(str(one.name))
        if one.name in unfit and source is not None and source.name == "COMMANDLINE":
            name = one.opts[0] if one.opts[0].startswith("-") else str(one.name).upper()
            raise UsageError(f"{name} means nothing to {beside}. Leave it out.")


def check_place(option: str, file: Path) -> None:
    """Raise if the output file's folder does not exist, before any work is done."""
    if not file.parent.is_dir():
        raise OutputError(f"{option} {file} is in no folder. Make {file.parent}, or name a file in another one.")


def text_inputs(inputs: list[str], format_: str | None) -> Inputs:
    """Resolve the inputs of a verb that reads text; `--format` says what `-` and files with unknown suffixes hold.

    Files of a folder that nobody can read as text are named.
    """
    from data_tools.read.sources import KNOWN, skipped_files, source_of

    found = [source_of(one, format_) for one in inputs]
    if format_ is not None and all(isinstance(one, str) for one in found):
        raise UsageError(f"--format={format_} is for - and for files whose names do not say what they hold. "
                         "None was given; leave it out.")  # fmt: skip
    if skipped := skipped_files(found):
        tell(f"left out: {join_few(map(str, skipped), max_shown=3)}. Folders are searched for {KNOWN}.")
    return found
