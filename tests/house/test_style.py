"""How the house is furnished: no crowded folder, door-plates, plain docstrings, names apart, one environment reader."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

MOST_MODULES = 14
# folders with a file or two for each kind, which are found by listing them
KINDS = (
    "data_tools/corpora", "lmtrain/eval/tasks", "lmtrain/exchange/huggingface/families", "lmtrain/models",
    "lmtrain/optim", "lmtrain/schedules",
)  # fmt: skip
LATER = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
NO_ROOMS = {"utils", "util", "common", "helpers", "helper", "misc"}
# a sentence about what a function does begins with a verb; with these begins one that its reader has to guess at
RIDDLES = re.compile(
    "(Of|Where|From|Such|As|What|Who|Those|These|That|This|One|Some|It|Its|Theirs|They|If|Which|Whose|With|Without|By|For"
    "|To|On|In|At|Before|After|And|Or|But|Not|No|Nothing|All|Each|Every|Both|Whatever|Whether|Until|Once|So|Why|How)\\b"
)
READ_THE_ENVIRONMENT = ("lmtrain.runtime.processes.process_environment", "lmtrain.runtime.compiled_helpers")


def folder_problems(house: Any) -> list[str]:
    """Folders of more modules than one looks through; those of kinds are as long as the list of kinds."""
    modules = [module.shown.rpartition("/")[0] for module in house.modules.values() if not module.is_package]
    return [
        f"{folder} has {count} modules, and {MOST_MODULES} are the most. Join what is one subject, or make a wing."
        for folder, count in Counter(modules).items()
        if count > MOST_MODULES and folder not in KINDS
    ]


def door_plate_problems(house: Any) -> list[str]:
    return [
        f"{module.shown} has no door-plate. Open it with a docstring: what it does, who calls it."
        for module in house.modules.values()
        if len((ast.get_docstring(module.tree) or "").split()) < 4
    ]


def later_problems(house: Any) -> list[str]:
    return [
        f"{module.shown}:{number} says {match[0]}. Do it, or leave it out and say so in the documentation."
        for module in house.modules.values()
        for number, line in enumerate(module.text.splitlines(), 1)
        if (match := LATER.search(line))
    ]


def name_problems(house: Any) -> list[str]:
    return [
        f"{module.shown} is named after nothing. Name it for what it holds."
        for module in house.modules.values()
        if NO_ROOMS & set(module.name.split("."))
    ]


def docstring_problems(house: Any) -> list[str]:
    return [
        f"{module.shown}:{node.lineno} explains {node.name} from {word[0]!r} on. Begin with what it does or returns."
        for module in house.modules.values()
        for node in module.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (word := RIDDLES.match(ast.get_docstring(node) or "")) is not None
    ]


def class_problems(house: Any) -> list[str]:
    """A name that two classes of a room have: who reads it in one of the room's files cannot tell which is meant."""
    first: dict[tuple[str, str], str] = {}
    problems = []
    for module in house.modules.values():
        parts = module.name.split(".")
        room = ".".join(parts[: 1 + (parts[0] == "lmtrain")])
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                other = first.setdefault((room, node.name), module.shown)
                if other != module.shown:
                    problems.append(
                        f"{module.shown}:{node.lineno} has a class {node.name}, and so has {other}. "
                        "Give each a name that says which it is."
                    )
    return problems


def environment_problems(house: Any) -> list[str]:
    problems = []
    for module in house.modules.values():
        if module.name in READ_THE_ENVIRONMENT:
            continue
        lines = {
            node.lineno
            for node in module.nodes
            if (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"))
            or (isinstance(node, ast.ImportFrom) and node.module == "os" and "environ" in {a.name for a in node.names})
        }
        problems += [
            f"{module.shown}:{line} reads the environment. Let runtime/processes/process_environment.py hand it in."
            for line in sorted(lines)
        ]
    return problems


CHECKS: list[Callable[[Any], list[str]]] = [
    folder_problems, door_plate_problems, later_problems, name_problems, docstring_problems, class_problems,
    environment_problems,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_house_is_in_order(house: Any, check: Callable[[Any], list[str]]) -> None:
    problems = check(house)
    assert not problems, "\n" + "\n".join(problems)


PLATE = '"""What this file is for, in words."""\n'


@pytest.mark.parametrize(
    ("check", "name", "source"),
    [
        (door_plate_problems, "lmtrain/data/a.py", "x = 1\n"),
        (door_plate_problems, "lmtrain/data/a.py", '"""Stuff."""\n'),
        (later_problems, "lmtrain/data/a.py", PLATE + "x = 1  # TODO\n"),
        (later_problems, "data_tools/a.py", PLATE + "raise NotImplementedError\n"),
        (name_problems, "lmtrain/data/utils.py", PLATE),
        (name_problems, "lmtrain/common/a.py", PLATE),
        (docstring_problems, "lmtrain/data/a.py", PLATE + 'def f():\n    """Of a file, its name."""\n'),
        (environment_problems, "lmtrain/data/a.py", PLATE + "import os\nx = os.environ['A']\n"),
        (environment_problems, "lmtrain/data/a.py", PLATE + "import os\nx = os.getenv('A')\n"),
        (environment_problems, "lmtrain/data/a.py", PLATE + "from os import environ\n"),
    ],
)
def test_a_planted_disorder_is_named(planted: Any, check: Callable[[Any], list[str]], name: str, source: str) -> None:
    (problem,) = check(planted({name: source}))
    assert name in problem


def test_a_crowded_folder_is_named(planted: Any) -> None:
    (problem,) = folder_problems(planted({f"lmtrain/data/m{number}.py": PLATE for number in range(MOST_MODULES + 1)}))
    assert "lmtrain/data has 15 modules" in problem


@pytest.mark.parametrize(
    ("other", "found"),
    [("lmtrain/data/store/b.py", 1), ("lmtrain/models/b.py", 0), ("lmtrain/data_b.py", 0), ("data_tools/b.py", 0)],
)
def test_a_class_name_twice_in_a_room_is_named(planted: Any, other: str, found: int) -> None:
    row = PLATE + "class Row:\n    pass\n"
    problems = class_problems(planted({"lmtrain/data/a.py": row, other: row}))
    assert len(problems) == found
    assert all(f"{other}:2 has a class Row, and so has lmtrain/data/a.py" in problem for problem in problems)


def test_good_order_passes(planted: Any) -> None:
    tree = planted({"lmtrain/runtime/processes/process_environment.py": PLATE + "import os\nx = os.environ.get('A')\n"})
    assert [problem for check in CHECKS for problem in check(tree)] == []
