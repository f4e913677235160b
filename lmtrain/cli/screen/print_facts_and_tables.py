"""The rich console of all verbs, and printers for facts: one per line, as a tree, or as a table.

Names and texts are printed as they are, never read as markup; runtime/terminal_safe_text.py escapes what a terminal
would execute. The printers are independent of verbs: they receive names and texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from lmtrain.config.settings_base import show
from lmtrain.runtime.processes.command_watch import note_output
from lmtrain.runtime.terminal_safe_text import escape_control_characters

_NAME_WIDTH = 15  # characters for a fact's name
Cells = Mapping[str, str]  # column title -> text, for one row of a table


class PlainConsole(Console):
    """A rich console without markup and emoji codes, on which escape sequences of a text are shown instead of executed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False} | options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, and note that this command has printed something."""
        note_output()
        super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_control_characters(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape the text of all segments, also of styled ones, but not of rich's own control segments."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_control_characters(segment.text), segment.style)


def print_facts(title: str, lines: Iterable[tuple[str, str]]) -> None:
    """Print a title on stdout, then a line "name value" for each pair in `lines`. Long values are wrapped on a
    terminal, not in a file or pipe.
    """
    screen = PlainConsole(highlight=False)
    screen.print(Text(title, style="bold"), soft_wrap=True)
    if not screen.is_terminal:
        for name, value in lines:
            screen.print(f"{name:{_NAME_WIDTH}} {value}", soft_wrap=True)
        return
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=_NAME_WIDTH, style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        table.add_row(name, Text(value))
    screen.print(table)


def print_tree(title: str, values: dict[str, Any]) -> None:
    """Print nested dicts, such as settings, as an indented tree on stdout, with `title` as its root; other values are
    printed as a user types them.
    """

    def grow(tree: Tree, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                grow(tree.add(key), value)
            else:
                tree.add(Text(f"{key}: {show(value)}"))

    grow(tree := Tree(title), values)
    PlainConsole(highlight=False).print(tree)


def print_table(rows: Sequence[Cells], *, gap: int = 2, optional_columns: Sequence[str] = ()) -> None:
    """Print a table on stdout; each row maps a column's title to the text of its cell, and `gap` is the number of
    spaces between columns. If the table is wider than the screen, the columns in `optional_columns` are left out.
    """
    screen = PlainConsole()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    widths = [max(len(column.lstrip("<")), *(len(row.get(column, "")) for row in rows)) for column in columns]
    if sum(widths) + gap * (len(widths) - 1) > screen.width:
        rows = [{column: cell for column, cell in row.items() if column not in optional_columns} for row in rows]
    screen.print(build_table(rows, gap=gap))


def build_table(rows: Sequence[Cells], *, gap: int = 2) -> Table:
    """Return a rich Table with a column for each key that occurs in `rows`; each row maps a column's title to the text
    of its cell. `gap` is the number of spaces between columns.

    A key that begins with `<` marks a column of words, which are left-aligned and may be wrapped; other columns hold
    numbers. HTML tables (cli/page/html_document.py) use the same rows.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        is_text = column.startswith("<")
        table.add_column(
            column.lstrip("<"), justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text
        )
    for row in rows:
        table.add_row(*(Text(row.get(column, "")) for column in columns))
    return table


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print pairs of texts on stdout as a table of two columns without column titles."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for pair in pairs:
        table.add_row(*map(Text, pair))
    PlainConsole().print(table)


def pick_evenly(count: int, max_count: int) -> list[int]:
    """Return the indices of the rows to show of `count`: all, or `max_count` of them at even distances, with the first
    and the last.
    """
    num_shown = min(count, max_count)
    return [round(index * (count - 1) / max(num_shown - 1, 1)) for index in range(num_shown)]
