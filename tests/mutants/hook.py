"""Code that each Python process of a copy runs first, children of children included. It is copied, so it stands alone.

A file `told.json` beside it says which copy this is, which file bears a planted mistake, and where to note what. The
file with the mistake is always compiled from its source, never taken from bytecode. Where reaching is recorded, each
statement inside a function sets a flag of its own as it runs, in a file that all processes of the copy share, so that
what a killed process had reached is known as well.
"""

from __future__ import annotations

import ast
import builtins
import json
import mmap
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

HERE = Path(__file__).resolve().parent


def note(file: str, line: str) -> None:
    """Append a line to a file that several processes write."""
    try:
        log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(log, line.encode() + b"\n")
        finally:
            os.close(log)
    except OSError:  # a test may have lowered what this process can open or write
        pass


def install(told: dict[str, Any]) -> None:
    usual = SourceFileLoader.get_code
    tree, originals, planted = told["tree"], tuple(told["originals"]), set(told["planted"])
    firsts: dict[str, int] = told["firsts"]

    def get_code(self: Any, fullname: str) -> CodeType | None:
        path = os.path.realpath(self.path)
        if path in planted:
            note(told["loaded"], fullname)
            return self.source_to_code(self.get_data(path), self.path)  # type: ignore[no-any-return]
        if path.startswith(originals):
            note(told["strangers"], path)
        if (first := firsts.get(os.path.relpath(path, tree))) is not None:
            return compile(with_flags(self.get_data(path), first), self.path, "exec", dont_inherit=True)
        return usual(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    if firsts:
        _record(told)


def statements(tree: ast.AST) -> list[tuple[list[ast.stmt], int]]:
    """Return the statements inside functions, but for docstrings, each as its block and its place there."""
    found = []
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, inside = waiting.pop()
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            block = getattr(node, name, None)
            if not isinstance(block, list):
                continue
            for place, child in enumerate(block):
                waiting.append((child, inside))
                is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                if inside and isinstance(child, ast.stmt) and not is_docstring:
                    found.append((block, place))
    return found


def with_flags(source: bytes, first: int) -> ast.Module:
    """Return the module with a flag set before each of its statements; `first` is the number of the first of them."""
    module = ast.parse(source)
    found = list(enumerate(statements(module), first))
    # because: a block grows from its end, so that places before stay what they were
    for number, (block, place) in sorted(found, key=lambda pair: pair[1][1], reverse=True):
        flag = ast.parse(f"__flags__[{number}] = 1").body[0]
        ast.increment_lineno(flag, block[place].lineno - 1)
        block.insert(place, flag)
    return ast.fix_missing_locations(module)


def _record(told: dict[str, Any]) -> None:
    with open(told["flags"], "r+b") as file:
        flags = mmap.mmap(file.fileno(), 0)
    builtins.__flags__ = flags  # type: ignore[attr-defined]
    files: dict[str, int] = told["files"]
    endings = tuple({os.path.splitext(file)[1] for file in files})

    def opened(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith(endings):
            number = files.get(os.path.relpath(os.path.realpath(arguments[0]), told["tree"]))
            if number is not None:
                flags[number] = 1

    if files:
        sys.addaudithook(opened)


if (HERE / "told.json").is_file():
    install(json.loads((HERE / "told.json").read_text()))
