"""The one way to the screen for plain text: what files hold is shown, and a terminal never obeys it.

Called by every verb that prints; tables and colours go through screen.py, which asks here. Must stay quick to import.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import typer

# because: these move the cursor, change the terminal, turn the order of letters round, or are no characters at all
_OBEYED = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)")


def escaped(text: str) -> str:
    r"""Every character that is more than ink as JSON writes it: an escape becomes \u001b. JSON stays the same JSON."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def say(text: object = "", *, err: bool = False, nl: bool = True, **style: Any) -> None:
    """A line for people or scripts; `style` is typer's, such as `bold=True`."""
    shown = escaped(str(text))
    typer.echo(typer.style(shown, **style) if style else shown, err=err, nl=nl)


def pass_on(text: str) -> None:
    """What a model wrote or a file holds: to a pipe or a file as it is, to a terminal as it says it."""
    typer.echo(escaped(text) if sys.stdout.isatty() else text, nl=False)
