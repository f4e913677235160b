"""A message on a terminal: lines end between words. Elsewhere a line stays one, to be searched and copied.

Called where a verb says something in sentences. Knows no verb.
"""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

from lmtrain.observe.escaped import escaped

if TYPE_CHECKING:
    from rich.console import Console

_HEAD = re.compile(r" *\d+\. |\w+ {2,}")  # of a list's entry, or of a fact: what follows goes on below its text
_TITLE = "error: "


def say(console: Console, message: str) -> None:
    """Words that are longer than a line, as paths can be, stay whole: the terminal breaks them, and copies them so."""
    from rich.text import Text

    from lmtrain.observe.display import print_line

    message = escaped(message)
    if not console.file.isatty():
        print_line(console, message)
        return
    text = Text("\n".join(_wrapped(line, console.width) for line in message.split("\n")))
    if message.startswith(_TITLE):
        text.stylize("bold red", 0, len(_TITLE))
    console.print(text, soft_wrap=True, highlight=False)


def tell(message: str) -> None:
    """On stderr, beside a verb's result."""
    from lmtrain.cli.screen import Screen

    say(Screen(stderr=True), message)


def _wrapped(line: str, width: int) -> str:
    head = _HEAD.match(line)
    return textwrap.fill(
        line, width, subsequent_indent=" " * (head.end() if head else 0), break_long_words=False, break_on_hyphens=False
    )
