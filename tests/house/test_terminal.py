"""All that is printed goes through a few files of cli/, which spell out what a terminal would otherwise obey."""

from __future__ import annotations

import ast
from typing import Any

import pytest

PRINTERS = {"typer.echo", "typer.secho", "typer.style", "click.echo", "print", "sys.stdout.write", "sys.stderr.write"}
CONSOLES = {"rich.console.Console", "rich.print", "rich.print_json"}
ALLOWED = {
    "lmtrain.cli.screen.terminal", "lmtrain.cli.screen.console",  # the way
    "lmtrain.cli.reference",  # writes pages, and is no verb
    "lmtrain.runtime.processes.launch",  # passes on what verbs have printed
    "lmtrain.runtime.processes.fork_server",  # ends its forks as Python does, which prints the text of a SystemExit
    "lmtrain.observe.watch.companion",  # a program of its own, which says in ASCII why its rank was ended
}  # fmt: skip


def printing_problems(house: Any) -> list[str]:
    problems = []
    for module in house.modules.values():
        if module.name in ALLOWED:
            continue
        names = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in module.nodes if isinstance(node, ast.ImportFrom) for alias in node.names
        }  # fmt: skip
        for node in (n for n in module.nodes if isinstance(n, ast.Call)):
            first, *rest = _words(node.func)
            called = ".".join([names.get(first, first), *rest])
            if called in PRINTERS | CONSOLES:
                instead = "console.py's Screen" if called in CONSOLES else "terminal.py's echo"
                problems.append(f"{module.shown}:{node.lineno} calls {called}. Print with cli/screen/{instead}.")
    return problems


def _words(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*_words(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def test_text_reaches_the_terminal_escaped(house: Any) -> None:
    problems = printing_problems(house)
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import typer\ntyper.echo('x')\n", "typer.echo"),
        ("from typer import echo as say\nsay('x')\n", "typer.echo"),
        ("def f():\n    from rich.console import Console\n    Console().print('x')\n", "rich.console.Console"),
        ("import rich\nrich.print('x')\n", "rich.print"),
        ("print('x')\n", "print"),
        ("import sys\nsys.stdout.write('x')\n", "sys.stdout.write"),
    ],
)
def test_another_way_to_the_screen_is_named(planted: Any, source: str, said: str) -> None:
    (problem,) = printing_problems(planted({"lmtrain/cli/a.py": source}))
    assert f"calls {said}." in problem


def test_the_ways_to_the_screen_pass(planted: Any) -> None:
    source = "from rich.console import Console\ndef f(a: Console) -> None:\n    a.print('x')\n    b().write('y')\n"
    assert printing_problems(planted({"lmtrain/observe/a.py": source, "lmtrain/cli/reference.py": "print(1)\n"})) == []
