"""The source tree as the house tests see it: modules, their syntax trees and what they import."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lmtrain", "data_tools")


@dataclass(frozen=True)
class Import:
    """One imported module: `target` is dotted and as deep as the tree knows; `late` stands inside a function."""

    target: str
    line: int
    late: bool


@dataclass(frozen=True)
class Module:
    name: str  # lmtrain.data.store.indexed_dataset
    path: Path
    shown: str  # the path as a message names it

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The nodes of the tree, which many tests look through."""
        return list(ast.walk(self.tree))

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


class House:
    """Every module below a root; made from the repository, and from planted trees where a test tests the tests."""

    def __init__(self, root: Path, rules: dict[str, Any]) -> None:
        self.root, self.rules = root, rules
        self.modules = {module.name: module for module in self._find()}
        self._imports: dict[str, list[Import]] = {}

    def _find(self) -> Iterator[Module]:
        for package in PACKAGES:
            for path in sorted((self.root / package).rglob("*.py")):
                parts = path.relative_to(self.root).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                yield Module(name, path, path.relative_to(self.root).as_posix())

    def imports(self, module: Module) -> list[Import]:
        if module.name not in self._imports:
            found: list[Import] = []
            self._walk(module, module.tree, False, found)
            self._imports[module.name] = found
        return self._imports[module.name]

    def _walk(self, module: Module, node: ast.AST, late: bool, found: list[Import]) -> None:
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = self._absolute(module, node)
            for alias in node.names:
                deeper = f"{base}.{alias.name}"  # `from lmtrain.data import format` names a module, not a value
                found.append(Import(deeper if deeper in self.modules else base, node.lineno, late))
        late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        late = late and not _guards_an_optional_import(node)
        for child in ast.iter_child_nodes(node):
            self._walk(module, child, late, found)

    @staticmethod
    def _absolute(module: Module, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parts = module.name.split(".")
        parts = parts[: len(parts) - node.level + module.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


def _guards_an_optional_import(node: ast.AST) -> bool:
    """`try: import x` with `except ImportError`: an optional back-end, which may be imported where it is needed."""
    return isinstance(node, ast.Try) and any(
        handler.type is not None and "ImportError" in ast.unparse(handler.type) for handler in node.handlers
    )


@pytest.fixture(scope="session")
def house() -> House:
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["lmtrain"]
    return House(ROOT, rules)


@pytest.fixture
def planted(tmp_path: Path, house: House) -> Any:
    """Builds a small wrong tree with the house's own rules: planted({"lmtrain/data/x.py": "import ..."})."""

    def plant(files: dict[str, str]) -> House:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return House(tmp_path, house.rules)

    return plant
