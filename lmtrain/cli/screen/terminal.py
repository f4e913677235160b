"""What verbs print: lines, JSON, and how far they are. What files hold is shown, and a terminal never obeys it.

Called by every verb; sentences go through messages.py, facts and tables through tables.py. Must stay quick to import.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import typer

from lmtrain.observe.safe_text import escaped

if TYPE_CHECKING:
    from lmtrain.observe.screen.progress import Reporter


def echo(text: object = "", *, err: bool = False, nl: bool = True, **style: Any) -> None:
    """A line for people or scripts; `style` is typer's, such as `bold=True`."""
    shown = escaped(str(text))
    typer.echo(typer.style(shown, **style) if style else shown, err=err, nl=nl)


def print_json(facts: object, *, indent: int | None = 1, **how: Any) -> None:
    """Print what --json asks for; `how` is the json module's, such as `ensure_ascii=False`."""
    echo(json.dumps(facts, indent=indent, **how))


def pass_on(text: str) -> None:
    """What a model wrote or a config holds: to a pipe or a file as it is, to a terminal spelt out."""
    typer.echo(escaped(text) if sys.stdout.isatty() else text, nl=False)


def progress(doing: str, unit: str = "", *, stopped: str = "") -> AbstractContextManager[Reporter]:
    """Show on stderr how far the work inside is; `stopped` is said after Ctrl-C."""
    from lmtrain.cli.screen.console import Screen
    from lmtrain.observe.screen import progress as shown

    return shown.progress(Screen(stderr=True), doing, unit, stopped=stopped)
