"""`--plugin PACKAGE`: kinds of models, optimizers, schedules and tasks from outside the package, for every verb."""

from __future__ import annotations

from typing import Annotated

import typer


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
