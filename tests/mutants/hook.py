"""Code that each Python process of a copy runs first, children of children included. It is copied, so it stands alone.

A file `told.json` beside it says which copy this is, which file bears a planted mistake, and where to note what. The
file with the mistake is always compiled from its source, never taken from bytecode. Where reaching is recorded, each
statement that some mutant would change notes the test that came by.
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
    tree, originals, planted = told["tree"], tuple(told["originals"]), told["planted"]
    statements: dict[str, list[list[int]]] = told["statements"]

    def get_code(self: Any, fullname: str) -> CodeType | None:
        path = os.path.realpath(self.path)
        if path == planted:
            note(told["loaded"], fullname)
            return self.source_to_code(self.get_data(path), self.path)  # type: ignore[no-any-return]
        if path.startswith(originals):
            note(told["strangers"], path)
        if (places := statements.get(os.path.relpath(path, tree))) is not None:
            return compile(with_notes(self.get_data(path), places), self.path, "exec", dont_inherit=True)
        return usual(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    if statements:
        _record(told)


def with_notes(source: bytes, places: list[list[int]]) -> ast.Module:
    """Return the module with a call before each statement: `places` are a line, a column and the mutant's number."""
    module = ast.parse(source)
    numbers: dict[tuple[int, int], list[int]] = {}
    for line, column, number in places:
        numbers.setdefault((line, column), []).append(number)
    for node in ast.walk(module):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if not isinstance(block, list):
                continue
            for index in range(len(block) - 1, -1, -1):
                for number in numbers.get((block[index].lineno, block[index].col_offset), ()):
                    call = ast.parse(f"__reached__({number})").body[0]
                    block.insert(index, ast.copy_location(call, block[index]))
    return ast.fix_missing_locations(module)


def _record(told: dict[str, Any]) -> None:
    with open(told["current"], "rb") as file:
        current = mmap.mmap(file.fileno(), 4, prot=mmap.PROT_READ)
    seen: set[tuple[bytes, int]] = set()

    def reached(number: int) -> None:
        key = current[:4], number
        if key not in seen:
            seen.add(key)
            note(told["reached"], f"{int.from_bytes(key[0], 'little')} {number}")

    builtins.__reached__ = reached  # type: ignore[attr-defined]
    files: dict[str, list[int]] = told["files"]

    def opened(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith(tuple(told["endings"])):
            for number in files.get(os.path.relpath(os.path.realpath(arguments[0]), told["tree"]), ()):
                reached(number)

    if files:
        sys.addaudithook(opened)


if (HERE / "told.json").is_file():
    install(json.loads((HERE / "told.json").read_text()))
