"""rich's console as every verb uses it, and facts as a person reads them: a line a fact, a tree, or a table.

Names and texts are shown as they are, none of it is markup or a command; what a terminal would obey is decided in
observe/safe_text.py. The one printer of each for all verbs, of which it knows none: it gets names and texts, and hands
the console to the panels of lower floors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from lmtrain.config.base import show
from lmtrain.observe.safe_text import escaped

_NAMES = 15  # columns of a fact's name
Cells = Mapping[str, str]  # of one row, by the column's title


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


def print_facts(title: str, lines: Iterable[tuple[str, str]]) -> None:
    """Print a fact a line. On a terminal long values go on under themselves; elsewhere a line can be searched whole."""
    screen = Screen(highlight=False)
    screen.print(Text(title, style="bold"), soft_wrap=True)
    if not screen.is_terminal:
        for name, value in lines:
            screen.print(f"{name:{_NAMES}} {value}", soft_wrap=True)
        return
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=_NAMES, style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        table.add_row(name, Text(value))
    screen.print(table)


def print_tree(title: str, values: dict[str, Any]) -> None:
    """Print settings and the like, with what is in them indented below."""

    def grow(tree: Tree, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                grow(tree.add(key), value)
            else:
                tree.add(Text(f"{key}: {show(value)}"))

    grow(tree := Tree(title), values)
    Screen(highlight=False).print(tree)


def print_table(rows: Sequence[Cells], *, gap: int = 2, spare: Sequence[str] = ()) -> None:
    """Print rows below their titles; the `spare` columns are left out where not all fit on a line."""
    screen = Screen()
    titles = list(dict.fromkeys(title for row in rows for title in row))
    widths = [max(len(title.lstrip("<")), *(len(row.get(title, "")) for row in rows)) for title in titles]
    if sum(widths) + gap * (len(widths) - 1) > screen.width:
        rows = [{title: said for title, said in row.items() if title not in spare} for row in rows]
    screen.print(table_of(rows, gap=gap))


def table_of(rows: Sequence[Cells], *, gap: int = 2) -> Table:
    """Return a column for each key; those that begin with `<` hold words, which may be broken; others numbers.

    They are written as the cells of a page's table are (page/document.py), so that one row serves both.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    titles = list(dict.fromkeys(title for row in rows for title in row))
    for title in titles:
        words = title.startswith("<")
        table.add_column(title.lstrip("<"), justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in rows:
        table.add_row(*(Text(row.get(title, "")) for title in titles))
    return table


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print a name and a text a row, in columns without titles."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for pair in pairs:
        table.add_row(*map(Text, pair))
    Screen().print(table)
