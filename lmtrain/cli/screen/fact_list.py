"""Facts as a person reads them: a title, then a line a fact. The one printer of `inspect` and of `lmtrain data`.

Knows no verb: it gets names and texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmtrain.config.base import show

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 15  # of the names
Lines = Sequence[tuple[str, str]]


def print_facts(console: Console, title: str, lines: Lines) -> None:
    """On a terminal long values go on under themselves; elsewhere a fact is one line, to be searched and copied."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(title, style="bold"), soft_wrap=True)
    if not console.is_terminal:
        for name, value in lines:
            console.print(f"{name:{WIDTH}} {value}", markup=False, highlight=False, soft_wrap=True)
        return
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=WIDTH, style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        table.add_row(name, Text(value))
    console.print(table)


def print_tree(console: Console, title: str, values: dict[str, Any]) -> None:
    """Settings and the like, with what is in them indented below."""
    from rich.tree import Tree

    def grow(tree: Tree, values: dict[str, Any]) -> None:
        from rich.text import Text

        for key, value in values.items():
            if isinstance(value, dict):
                grow(tree.add(key), value)
            else:
                tree.add(Text(f"{key}: {show(value)}"))

    tree = Tree(title)
    grow(tree, values)
    console.print(tree, highlight=False)
