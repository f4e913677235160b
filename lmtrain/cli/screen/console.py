"""rich's console as every verb uses it: names and texts are shown as they are, none of it is markup or a command.

What a terminal would obey is decided in observe/safe_text.py. Called by verbs, which hand it to the panels and tables
of lower floors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from lmtrain.observe.safe_text import escaped


class Screen(Console):
    """`[/b]` in a file's name is a file's name; so is an escape sequence, and it takes the room that it is shown in."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False} | options)

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(escaped(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Also of texts that come with a style of their own; what moves the cursor is rich's own, and marked so."""
        for one in super().render(renderable, options):
            yield one if one.control else Segment(escaped(one.text), one.style)
