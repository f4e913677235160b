"""Plain text to the screen: what files hold is shown, and a terminal never obeys it. Must stay quick to import.

Called by every verb that prints; sentences go through say.py, tables and colours through screen.py.
"""

from __future__ import annotations

import sys
from typing import Any

import typer

from lmtrain.observe.safe_text import escaped


def echo(text: object = "", *, err: bool = False, nl: bool = True, **style: Any) -> None:
    """A line for people or scripts; `style` is typer's, such as `bold=True`."""
    shown = escaped(str(text))
    typer.echo(typer.style(shown, **style) if style else shown, err=err, nl=nl)


def pass_on(text: str) -> None:
    """What a model wrote or a config holds: to a pipe or a file as it is, to a terminal spelt out."""
    typer.echo(escaped(text) if sys.stdout.isatty() else text, nl=False)
