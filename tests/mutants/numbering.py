"""A number for each statement of the product, by which a recording tells what a test reached.

A recording outlives changes of the code: a statement is found again by its function, its first line and how many of the
same stand before it there, so that what did not change keeps what is known of it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.mutants import hook
from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.places import statement

DATA = (".yaml", ".sh")


@dataclass(frozen=True)
class Numbering:
    """Numbers of the statements of all files: each file has its first, and the keys of its statements in order."""

    files: dict[str, tuple[int, list[str]]]

    @property
    def size(self) -> int:
        return max((first + len(keys) for first, keys in self.files.values()), default=0)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.files).encode()).hexdigest()[:16]

    def told(self) -> dict[str, Any]:
        """Return what the processes of a copy are told."""
        code = {file: first for file, (first, _) in self.files.items() if file.endswith(".py")}
        data = {file: first for file, (first, _) in self.files.items() if not file.endswith(".py")}
        return {"firsts": code, "files": data}

    def numbers(self, file: str, keys: list[str]) -> list[int]:
        """Return the numbers of statements that are looked for by their keys.

        Of one that this numbering does not know, it is its whole function, and else the whole file.
        """
        first, known = self.files.get(file, (0, []))
        found: list[int] = []
        for key in keys:
            function = key.partition("|")[0]
            close = [i for i, other in enumerate(known) if other == key]
            close = close or [i for i, other in enumerate(known) if function and other.partition("|")[0] == function]
            found += close or range(len(known))
        return sorted({first + index for index in found})


def number_statements(tree: Path) -> Numbering:
    """Number what is there in a checkout: code, and the data files that come with it."""
    files: dict[str, tuple[int, list[str]]] = {}
    first = 0
    for root in ("lmtrain", "data_tools", "conf"):
        for path in sorted((tree / root).rglob("*")):
            name = str(path.relative_to(tree))
            if path.suffix == ".py":
                keys = [key for key, _ in keys_and_places(path.read_text())]
            elif path.suffix in DATA:
                keys = ["file"]
            else:
                continue
            files[name] = first, keys
            first += len(keys)
    return Numbering(files)


def keys_and_places(text: str) -> list[tuple[str, tuple[int, int]]]:
    """Return the key of each statement inside functions, with its line and column."""
    tree, lines = ast.parse(text), text.splitlines()
    names: dict[int, str] = {}
    _name(tree, "", names)
    seen: Counter[str] = Counter()
    found = []
    for block, place in hook.statements(tree):
        node = block[place]
        key = f"{names[id(node)]}|{lines[node.lineno - 1].strip()}"
        seen[key] += 1
        found.append((f"{key}|{seen[key]}", (node.lineno, node.col_offset)))
    return found


def _name(node: ast.AST, function: str, names: dict[int, str]) -> None:
    for child in ast.iter_child_nodes(node):
        names[id(child)] = function
        is_named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        _name(child, f"{function}.{child.name}".strip(".") if is_named else function, names)  # type: ignore[attr-defined]


@cache
def _keys_of(file: str) -> dict[tuple[int, int], str]:
    return {place: key for key, place in keys_and_places((ROOT / file).read_text())}


def reached_through(mutant: Mutant) -> dict[str, list[str]]:
    """Return the statements, by file and key, one of which a test must come by to notice this mistake."""
    if mutant.file.startswith("csrc/"):
        return callers_of_helper(mutant.file)
    if not mutant.file.endswith(".py"):
        return {mutant.file: ["file"]}
    if (place := statement(mutant)) is not None:
        return {mutant.file: [_keys_of(mutant.file).get(place, f"{mutant.function}|")]}
    text = (ROOT / mutant.file).read_text()
    return users_of_names(_names_bound_at(text, {text.count("\n", 0, mutant.begin(text)) + 1}))


def through_lines(file: str, lines: set[int]) -> dict[str, list[str]]:
    """Return the statements, by file and key, one of which a test must come by to notice that these lines changed."""
    if file.startswith("csrc/"):
        return callers_of_helper(file)
    if not file.endswith(".py"):
        return {file: ["file"]}
    places = sorted(_keys_of(file))
    text = (ROOT / file).read_text()
    functions = [
        range(node.lineno, (node.end_lineno or 0) + 1) for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]  # fmt: skip
    keys = []
    outside = set()
    for line in lines:
        if any(line in function for function in functions):
            before = [place for place in places if place[0] <= line] or places[:1]
            keys += [_keys_of(file)[place] for place in before[-1:]]
        else:
            outside.add(line)
    found = users_of_names(_names_bound_at(text, outside))
    found.setdefault(file, []).extend(keys)
    return found


def callers_of_helper(file: str) -> dict[str, list[str]]:
    """Return the statements that call what this file of csrc compiles to.

    What it does not name itself, such as the parts of the encoder, any of them may call.
    """
    defined = re.compile(r"module(?:\.def\(|, )\"(\w+)\"")
    names = set(defined.findall((ROOT / file).read_text()))
    found: dict[str, list[str]] = {}
    for path in _code():
        text = path.read_text()
        if "compiled_helpers" in text and (not names or any(re.search(rf"\b{name}\b", text) for name in names)):
            lines, name = text.splitlines(), str(path.relative_to(ROOT))
            keys = [key for (line, _), key in _keys_of(name).items() if "compiled_helpers" in lines[line - 1]]
            if keys:
                found[name] = keys
    return found


def users_of_names(names: set[str]) -> dict[str, list[str]]:
    """Return the statements that mention one of these names, of constants or fields, anywhere in the product."""
    if not names:
        return {}
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in sorted(names)))
    found: dict[str, list[str]] = {}
    for path in _code():
        text, name = path.read_text(), str(path.relative_to(ROOT))
        if not pattern.search(text):
            continue
        lines = text.splitlines()
        # because: a statement of several lines may mention it on any of them
        places = sorted(_keys_of(name))
        for index, place in enumerate(places):
            last = places[index + 1][0] - 1 if index + 1 < len(places) else len(lines)
            if any(pattern.search(line) for line in lines[place[0] - 1 : max(place[0], last)]):
                found.setdefault(name, []).append(_keys_of(name)[place])
    return found


def _names_bound_at(text: str, lines: set[int]) -> set[str]:
    """Return the names that the statements on these lines bind."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and lines & {*range(node.lineno, (node.end_lineno or 0) + 1)}:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return names


@cache
def _code() -> list[Path]:
    return [path for root in ("lmtrain", "data_tools") for path in sorted((ROOT / root).rglob("*.py"))]
