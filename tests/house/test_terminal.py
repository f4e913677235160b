"""All that is printed goes through a few files of cli/, which spell out what a terminal would otherwise obey.

There is one printer of tables and one of JSON, so that all verbs print them alike.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

PRINTERS = {"typer.echo", "typer.secho", "typer.style", "click.echo", "print", "sys.stdout.write", "sys.stderr.write"}
CONSOLES = {"rich.console.Console", "rich.print", "rich.print_json"}
ALLOWED = {
    "lmtrain.cli.screen.print_messages_and_json", "lmtrain.cli.screen.print_facts_and_tables",  # the way
    "lmtrain.cli.reference",  # writes pages, and is no verb
    "lmtrain.runtime.processes.local_rank_launcher",  # passes on what verbs have printed
    "lmtrain.runtime.processes.fork_server",  # ends its forks as Python does, which prints the text of a SystemExit
    "lmtrain.observe.hang_watch.watchdog_companion_process",  # a program that says in ASCII why its rank was ended
}  # fmt: skip
TABLES_OF_THEIR_OWN = {
    "lmtrain.cli.screen.print_facts_and_tables",  # the printer
    "lmtrain.cli.data.tokenizer_command",  # in a box, since a piece may be a blank
}  # fmt: skip


def printing_problems(house: Any) -> list[str]:
    problems = []
    for module in house.modules.values():
        for node, called in calls(module) if module.name not in ALLOWED else ():
            if called in PRINTERS | CONSOLES:
                instead = "print_messages_and_json.py's echo"
                if called in CONSOLES:
                    instead = "print_facts_and_tables.py's PlainConsole"
                problems.append(f"{module.shown}:{node.lineno} calls {called}. Print with cli/screen/{instead}.")
    return problems


def second_printer_problems(house: Any) -> list[str]:
    """Where a verb makes a table of its own, or prints JSON by itself."""
    problems = []
    for module in house.modules.values():
        if not module.name.startswith("lmtrain.cli.") or module.name in TABLES_OF_THEIR_OWN:
            continue
        found = [*calls(module)]
        dumped = {id(node) for node, called in found if called in ("json.dumps", "json.dump")}
        for node, called in found:
            if called == "rich.table.Table":
                problems.append(f"{module.shown}:{node.lineno} makes a table. Use screen/print_facts_and_tables.py.")
            if called.endswith((".echo", ".print", ".print_text")) and dumped & set(map(id, ast.walk(node))):
                problems.append(f"{module.shown}:{node.lineno} prints JSON. Use print_messages_and_json.py.")
    return problems


def calls(module: Any) -> Iterator[tuple[ast.Call, str]]:
    """Every call of a module, with the whole name of what is called as far as its imports tell."""
    names = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in module.nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }  # fmt: skip
    for node in module.nodes:
        if isinstance(node, ast.Call):
            first, *rest = _words(node.func)
            yield node, ".".join([names.get(first, first), *rest])


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


def test_verbs_print_tables_and_json_in_one_way(house: Any) -> None:
    problems = second_printer_problems(house)
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f():\n    from rich.table import Table\n    Table('a')\n", "a.py:3 makes a table"),
        ("import rich.table\nrich.table.Table.grid()\nrich.table.Table()\n", "a.py:3 makes a table"),
        (
            "import json\nfrom lmtrain.cli.screen.print_messages_and_json import echo\n"
            "echo(json.dumps({}, indent=1))\n",
            "a.py:3 prints JSON",
        ),
        ("from json import dumps\ndef f(console):\n    console.print(f'{dumps({})}')\n", "a.py:3 prints JSON"),
    ],
)
def test_a_second_printer_is_named(planted: Any, source: str, said: str) -> None:
    (problem,) = second_printer_problems(planted({"lmtrain/cli/a.py": source}))
    assert said in problem


def test_what_is_no_second_printer_passes(planted: Any) -> None:
    file = "import json\ndef f(path):\n    path.write_text(json.dumps({}))\n"
    report = "from rich.table import Table\nTable()\n"
    files = {"lmtrain/cli/a.py": file, "lmtrain/eval/print_evaluation_results.py": report}
    assert second_printer_problems(planted(files)) == []
