"""Options and arguments that several verbs take, and the sizes that they may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from lmtrain.errors import UsageError
from lmtrain.units import parse_bytes


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
ConfigDir = Annotated[Path | None, typer.Option(help="A folder of your own configs; it wins over conf/.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")]
Precision = Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="In which numbers to compute.")]
CHECKPOINT = typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run's folder for its latest one.")


def parse_size(option: str, text: str, parse: Callable[[str], int] = parse_bytes) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option} {text} {error}.") from error
