"""A room imports only from lower floors; the floors stand in pyproject.toml under [tool.lmtrain]."""

from __future__ import annotations

import ast
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import pytest

COMPILED_HELPERS = "lmtrain.runtime.compiled_helpers"
TYPED_WORDS = "lmtrain.config.typed_words"


def room_of(name: str) -> str:
    """lmtrain.data.loader -> data; lmtrain.errors -> errors; data_tools.read.pool -> data_tools; lmtrain -> "".

    `python -m lmtrain` is the door of the house and in no room.
    """
    first, *rest = name.split(".")
    return first if first != "lmtrain" else (rest[0] if rest not in ([], ["__main__"]) else "")


def floor_problems(house: Any) -> list[str]:
    """Every import that goes up or sideways, in words."""
    floors = {room: number for number, rooms in enumerate(house.rules["floors"]) for room in rooms}
    problems = []
    for module in house.modules.values():
        here = room_of(module.name)
        if here not in ("", "data_tools", *floors):
            problems.append(f"{module.shown}: the room {here} stands on no floor. Add it to floors in pyproject.toml.")
            continue
        for item in house.imports(module):
            there = room_of(item.target)
            if item.target.split(".")[0] not in ("lmtrain", "data_tools") or there in ("", here):
                continue
            target = house.modules.get(item.target)
            pair = f"{module.shown}:{item.line} imports {target.shown if target else item.target}"
            if here == "data_tools":
                problems += _data_tools_problem(pair, item.target, house.rules["data_tools_may_import"])
            elif there == "data_tools":
                allowed = house.rules["may_import_data_tools"]
                if here not in allowed:
                    problems.append(f"{pair}: only {' and '.join(allowed)} may know data_tools. Let them hand it over.")
            elif item.target == TYPED_WORDS and here not in house.rules["may_read_words"]:
                problems.append(f"{pair}: it gets settings, and no words. Let the caller say what was typed.")
            elif there == "_native":
                if module.name != COMPILED_HELPERS:
                    problems.append(f"{pair}: only {COMPILED_HELPERS} loads the compiled helpers. Use its `lib`.")
            elif there not in floors:
                problems.append(f"{pair}: there is no such room. Add it to floors in pyproject.toml.")
            elif here and (floors[there] > floors[here] or floors[there] == floors[here] > 0):  # the ground is one room
                way = "sideways" if floors[there] == floors[here] else "up"
                problems.append(
                    f"{pair}: {way}, from floor {floors[here]} to {floors[there]}. "
                    "Move the shared part to a lower floor, or let the caller above hand it in."
                )
    return problems


def _data_tools_problem(pair: str, target: str, allowed: list[str]) -> list[str]:
    short = target.removeprefix("lmtrain.")
    if any(short == name or short.startswith(f"{name}.") for name in allowed):
        return []
    return [f"{pair}: data_tools may import {', '.join(allowed)}. Move what it needs into one of them."]


def cycle_problems(house: Any) -> list[str]:
    """A ring of imports inside a room, with the files that form it."""
    graph = {
        name: {item.target for item in house.imports(module) if item.target in house.modules and item.target != name}
        for name, module in house.modules.items()
        if not module.is_package
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        ring = " -> ".join(house.modules[name].shown for name in error.args[1])
        return [f"imports go in a ring: {ring}. Move what both sides need into a third file."]
    return []


def wing_of(name: str) -> str:
    """lmtrain.data.store.dataset_writer -> lmtrain.data.store; a file that stands in no wing is its own."""
    parts = name.split(".")
    deep = 3 if parts[0] == "lmtrain" else 2
    return ".".join(parts[:deep])


def wing_problems(house: Any) -> list[str]:
    """Wings (sub-folders of a room) and the files beside them import one another one way; some not at all."""
    graph: dict[str, set[str]] = {}
    examples: dict[tuple[str, str], str] = {}
    for name, module in house.modules.items():
        for item in house.imports(module):
            here, there = wing_of(name), wing_of(item.target)
            if item.target in house.modules and here != there and room_of(name) == room_of(item.target):
                graph.setdefault(here, set()).add(there)
                examples[here, there] = f"{module.shown}:{item.line} imports {house.modules[item.target].shown}"
    problems = [
        f"{example}: {' and '.join(pair)} stand apart. Move what both need into a place below both."
        for pair in house.rules["apart"]
        for (here, there), example in examples.items()
        if {here, there} == set(pair)
    ]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        ring = list(reversed(error.args[1]))
        steps = "; ".join(examples[pair] for pair in pairwise(ring))
        problems.append(f"wings import each other: {steps}. Move what both need into one of them, or below both.")
    return problems


def init_problems(house: Any) -> list[str]:
    problems = []
    for module in house.modules.values():
        if not module.is_package or module.name == "lmtrain":  # test_python_interface.py looks at that one
            continue
        body = module.tree.body
        docstring = bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        if not docstring or len(body) > 1:
            problems.append(f"{module.shown}: holds more or less than a docstring. Move the code to a named file.")
    return problems


def late_import_problems(house: Any) -> list[str]:
    """Imports inside functions hide the floors; outside start and cli each has `# because:` there or above."""
    problems = []
    for module in house.modules.values():
        if room_of(module.name) in ("start", "cli"):
            continue
        lines = module.text.splitlines()
        for item in house.imports(module):
            if item.late and not _has_reason(lines, item.line - 1):
                problems.append(
                    f"{module.shown}:{item.line} imports {item.target} inside a function. "
                    "Move it to the top of the file, or say why not with `# because:`."
                )
    return problems


def _has_reason(lines: list[str], at: int) -> bool:
    if "# because:" in lines[at]:
        return True
    while at > 0 and lines[at].strip().startswith(("import ", "from ")):
        at -= 1
    while at > 0 and lines[at].strip().startswith("#") and "# because:" not in lines[at]:
        at -= 1
    return lines[at].strip().startswith("# because:")


def distributed_problems(house: Any) -> list[str]:
    """A model says what may be split and never how: no torch.distributed below models/."""
    problems = []
    for module in house.modules.values():
        if room_of(module.name) != "models":
            continue
        lines = {item.line for item in house.imports(module) if item.target.startswith("torch.distributed")}
        lines |= {
            node.lineno
            for node in module.nodes
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed")
        }
        problems += [
            f"{module.shown}:{line} uses torch.distributed. Say it in words of lmtrain/spec.py; parallel/ applies them."
            for line in sorted(lines)
        ]
    return problems


def screen_problems(house: Any) -> list[str]:
    """The room that begins a run or an evaluation knows no command line: its callers parse options and print."""
    return [
        f"{module.shown}:{item.line} imports {item.target}. Let cli do that, or hand in a function that does."
        for module in house.modules.values() if room_of(module.name) == "start"
        for item in house.imports(module) if item.target.split(".")[0] in ("typer", "click", "rich")
    ]  # fmt: skip


CHECKS: list[Callable[[Any], list[str]]] = [
    floor_problems, cycle_problems, wing_problems, init_problems, late_import_problems, distributed_problems,
    screen_problems,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_house_stands(house: Any, check: Callable[[Any], list[str]]) -> None:
    problems = check(house)
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize(
    ("check", "files", "said"),
    [
        (floor_problems, {"lmtrain/data/a.py": "from lmtrain.train import b\n", "lmtrain/train/b.py": ""}, "b.py: up,"),
        (floor_problems, {"lmtrain/data/a.py": "import lmtrain.models.gpt\n"}, "sideways"),
        (floor_problems, {"lmtrain/data/a.py": "from ..models import gpt\n"}, "lmtrain.models: sideways"),
        (floor_problems, {"lmtrain/data/a.py": "from lmtrain._native import x\n"}, f"only {COMPILED_HELPERS}"),
        (floor_problems, {"lmtrain/attic/a.py": ""}, "stands on no floor"),
        (floor_problems, {"lmtrain/data/a.py": "import lmtrain.attic\n"}, "no such room"),
        (floor_problems, {"lmtrain/train/a.py": "import data_tools.x\n"}, "only start and cli may know"),
        (floor_problems, {"lmtrain/train/a.py": f"from {TYPED_WORDS} import is_typed\n"}, "settings, and no words"),
        (floor_problems, {"data_tools/a.py": "import lmtrain.data.loader\n"}, "data_tools may import"),
        (
            cycle_problems,
            {"lmtrain/data/a.py": "from . import b\n", "lmtrain/data/b.py": "import lmtrain.data.a\n"},
            "ring",
        ),
        (
            wing_problems,
            {
                "lmtrain/data/store/a.py": "import lmtrain.data.samples.b\n",
                "lmtrain/data/samples/b.py": "",
                "lmtrain/data/samples/c.py": "import lmtrain.data.store.d\n",
                "lmtrain/data/store/d.py": "",
            },
            "lmtrain/data/samples/c.py:1 imports lmtrain/data/store/d.py",
        ),
        (
            wing_problems,
            {
                "data_tools/read/a.py": "import data_tools.between\n",
                "data_tools/between.py": "import data_tools.read.b\n",
                "data_tools/read/b.py": "",
            },
            "data_tools/between.py:1 imports data_tools/read/b.py",
        ),
        (
            wing_problems,
            {
                "lmtrain/exchange/huggingface/a.py": "import lmtrain.exchange.megatron.b\n",
                "lmtrain/exchange/megatron/b.py": "",
            },
            "stand apart",
        ),
        (init_problems, {"lmtrain/data/__init__.py": '"""Data."""\nx = 1\n'}, "lmtrain/data/__init__.py"),
        (init_problems, {"lmtrain/data/__init__.py": ""}, "lmtrain/data/__init__.py"),
        (late_import_problems, {"lmtrain/data/a.py": "def f():\n    import gzip\n"}, "a.py:2 imports gzip inside"),
        (distributed_problems, {"lmtrain/models/a.py": "import torch\ntorch.distributed.barrier()\n"}, "a.py:2 uses"),
        (screen_problems, {"lmtrain/start/a.py": "def f():\n    import rich.text\n"}, "a.py:2 imports rich"),
        (distributed_problems, {"lmtrain/models/a.py": "from torch.distributed import barrier\n"}, "a.py:1 uses"),
    ],
)
def test_a_planted_fault_is_named(
    planted: Any, check: Callable[[Any], list[str]], files: dict[str, str], said: str
) -> None:
    problems = check(planted(files))
    assert any(said in problem for problem in problems), problems


def test_what_is_allowed_passes(planted: Any) -> None:
    tree = planted(
        {
            "lmtrain/__init__.py": '"""House."""\n__version__ = "1"\n',
            "lmtrain/layout.py": "import lmtrain.errors\n",
            "lmtrain/data/a.py": "import json\nfrom lmtrain.runtime import files\nfrom . import b\n",
            "lmtrain/data/b.py": "def f():\n    # because: slow,\n    # and rare\n    import gzip\n    import bz2\n",
            "lmtrain/data/d.py": "def f():\n    try:\n        import gzip\n    except ImportError:\n        pass\n",
            "lmtrain/data/c.py": "def f():\n    import gzip  # because: optional\n",
            "lmtrain/cli/a.py": "def f():\n    import lmtrain.train.b\n    import data_tools.a\n",
            "lmtrain/start/a.py": "def f():\n    import data_tools.a\n",
            "data_tools/a.py": "from lmtrain.data.store.indexed_dataset import IndexedDataset\nimport lmtrain.errors\n",
        }
    )
    assert [problem for check in CHECKS for problem in check(tree)] == []
