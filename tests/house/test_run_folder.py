"""What lies in the folder of a run has its name in one place, one writer and one reader: lmtrain/runfolder/."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from lmtrain.runfolder import file_names

ROOM = "lmtrain.runfolder"
# of these, others' folders have no file; "config.json" and "checkpoints" mean more than a run's
OURS = {
    file_names.METRICS, file_names.STOP, file_names.ENVIRONMENT, file_names.FAILED_STARTS, file_names.PHASE_TIMES,
    file_names.LOG,
}  # fmt: skip
READ_AND_WRITE_ROWS = {f"{ROOM}.metrics_rows", "lmtrain.observe.metrics"}
OPENERS = {
    "open", "read_text", "read_bytes", "read_json", "read_range", "open_regular", "open_output", "atomic_file",
    "GrowingFile", "fromfile", "memmap",
}  # fmt: skip
WRITERS = {
    "atomic_file", "write_json", "open_output", "write_text", "write_bytes", "rename", "replace", "link", "symlink",
    "copy", "copyfile", "move", "touch",
}  # fmt: skip


def name_problems(house: Any) -> list[str]:
    """A name that is spelt anywhere else."""
    return [
        f"{module.shown}:{node.lineno} spells {node.value}. Import its name from lmtrain/runfolder/file_names.py."
        for module in house.modules.values()
        if module.name != f"{ROOM}.file_names"
        for node in module.nodes
        if isinstance(node, ast.Constant) and node.value in OURS
    ]


def stop_problems(house: Any) -> list[str]:
    """Outside of the room nobody knows the place of stop.json; inside of it one module alone writes."""
    problems = []
    for module in house.modules.values():
        inside = module.name.startswith(f"{ROOM}.")
        if not inside:
            problems += [
                f"{module.shown}:{node.lineno} handles stop.json itself. Read it by "
                "lmtrain/runfolder/read_and_record_run_end.py, and write it by that or by stop_json_writer.py."
                for node in module.nodes
                if _is_stop(node)
            ]
        elif module.name != f"{ROOM}.stop_json_writer":
            problems += [
                f"{module.shown}:{node.lineno} writes by {_called(node)}. Of this room only stop_json_writer.py writes."
                for node in module.nodes
                if isinstance(node, ast.Call) and _writes(node)
            ]
    return problems


def _is_stop(node: ast.AST) -> bool:
    """`from lmtrain.runfolder.file_names import STOP`, or `names.STOP`."""
    if isinstance(node, ast.ImportFrom):
        return node.module == f"{ROOM}.file_names" and any(alias.name == "STOP" for alias in node.names)
    return isinstance(node, ast.Attribute) and node.attr == "STOP" and ast.unparse(node.value).endswith("names")


def _writes(call: ast.Call) -> bool:
    given = [*call.args[1:], *(one.value for one in call.keywords)]
    opens = _called(call) == "open" and any(_is_text(one) and set("wxa+") & set(ast.unparse(one)) for one in given)
    return opens or (_called(call) in WRITERS and not _is_method_of_text(call))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_method_of_text(call: ast.Call) -> bool:
    """`text.replace("a", "b")`, which writes nothing."""
    return _called(call) == "replace" and len(call.args) == 2 and all(map(_is_text, call.args))


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def row_problems(house: Any) -> list[str]:
    """Who opens metrics.jsonl beside what reads and writes rows."""
    return [
        f"{module.shown}:{node.lineno} opens metrics.jsonl by {_called(node)}. Use lmtrain/runfolder/metrics_rows.py."
        for module in house.modules.values()
        if module.name not in READ_AND_WRITE_ROWS and "METRICS" in module.text
        for part in _parts(module)
        for node in _opened(part)
    ]


def _parts(module: Any) -> list[list[ast.AST]]:
    """The nodes of each function, and those outside of all."""
    functions = [node for node in module.nodes if isinstance(node, ast.FunctionDef)]
    outside = [node for node in module.tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return [[*ast.walk(one)] for one in [ast.Module(outside, []), *functions]]


def _opened(part: list[ast.AST]) -> list[ast.Call]:
    """What is opened by its path: METRICS, and variables that are made with it."""
    made = [node for node in part if isinstance(node, ast.Assign) and _names(node.value, {"METRICS"})]
    paths = {"METRICS"} | {ast.unparse(target) for node in made for target in node.targets}
    return [node for node in part if isinstance(node, ast.Call) and _called(node) in OPENERS and _names(node, paths)]


def _names(node: ast.AST, words: set[str]) -> bool:
    """Whether one of these is named in it, as itself or as `names.METRICS`."""
    found = (ast.unparse(one) for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute)))
    return any(name in words or name == "names.METRICS" for name in found)


CHECKS: list[Callable[[Any], list[str]]] = [name_problems, stop_problems, row_problems]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_file_of_a_run_has_one_home(house: Any, check: Callable[[Any], list[str]]) -> None:
    problems = check(house)
    assert not problems, "\n" + "\n".join(problems)


METRICS, STOP = (f"from lmtrain.runfolder.file_names import {name}\n" for name in ("METRICS", "STOP"))


@pytest.mark.parametrize(
    ("check", "name", "text", "said"),
    [
        (name_problems, "lmtrain/train/a.py", 'x = "metrics.jsonl"\n', "a.py:1 spells metrics.jsonl"),
        (name_problems, "lmtrain/cli/a.py", 'def f(x):\n    return x / "stop.json"\n', "a.py:2 spells stop.json"),
        (stop_problems, "lmtrain/train/a.py", STOP, "a.py:1 handles stop.json itself"),
        (
            stop_problems, "lmtrain/cli/a.py", "from lmtrain.runfolder import file_names\nx = file_names.STOP\n",
            "a.py:2 handles stop.json itself",
        ),
        (stop_problems, "lmtrain/runfolder/ended.py", 'open("a", "x")\n', "ended.py:1 writes by open"),
        (stop_problems, "lmtrain/runfolder/ended.py", 'open("a", mode="w")\n', "ended.py:1 writes by open"),
        (stop_problems, "lmtrain/runfolder/a.py", "import os\nos.replace(a, b)\n", "a.py:2 writes by replace"),
        (stop_problems, "lmtrain/runfolder/a.py", "write_json(path, {})\n", "a.py:1 writes by write_json"),
        (row_problems, "lmtrain/cli/a.py", f"{METRICS}open(run / METRICS)\n", "a.py:2 opens metrics.jsonl by open"),
        (
            row_problems, "lmtrain/train/a.py", f"{METRICS}path = run / METRICS\nx = path.read_text()\n",
            "a.py:3 opens metrics.jsonl by read_text",
        ),
        (
            row_problems, "lmtrain/plan/a.py", f"{METRICS}rows = list(map(parse, open(str(run / METRICS))))\n",
            "a.py:2 opens metrics.jsonl by open",
        ),
    ],
)  # fmt: skip
def test_a_planted_fault_is_named(
    planted: Any, check: Callable[[Any], list[str]], name: str, text: str, said: str
) -> None:
    problems = check(planted({name: text}))
    assert any(said in problem for problem in problems), problems


def test_what_is_allowed_passes(planted: Any) -> None:
    tree = planted(
        {
            "lmtrain/cli/a.py": f"{METRICS}path = run / METRICS\nrows = read_metrics(path) if path.is_file() else []\n"
            "record = read_record(run / METRICS)\nfollowed = Followed(run / METRICS)\n",
            "lmtrain/train/a.py": f"{METRICS}log = MetricsLog(run / METRICS, warn)\nlist(read_last_rows(METRICS))\n",
            "lmtrain/runfolder/read_and_record_run_end.py": STOP + 'x = open(run / STOP)\ny = "a".replace("a", "b")\n',
            "lmtrain/runfolder/stop_json_writer.py": 'import os\nopen("a", "xb")\nos.link("a", "b")\n',
        }
    )
    assert [problem for check in CHECKS for problem in check(tree)] == []
