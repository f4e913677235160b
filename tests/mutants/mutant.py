"""What a planted mistake is, and how it is planted: a file, a function in it, old text and new text.

A mutant whose old text is not there exactly once fails loudly, so that it moves with its code or is replaced.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import pkgutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tests.mutants import rooms

ROOT = Path(__file__).resolve().parents[2]


class DoesNotApplyError(Exception):
    """The code that a mutant changes has changed itself."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A mistake that somebody could make, and what users would suffer from it."""

    name: str  # unique in its room; words with underscores
    file: str  # from the root of the checkout
    function: str  # "function", "Class.method" or "Class"; "" for a line outside of functions, or a file of no Python
    old: str  # text that stands once in that function
    new: str
    breaks: str  # what goes wrong, in a sentence
    only_for: str = ""  # for which layouts, sizes or inputs alone it is wrong; "" if for most runs

    @property
    def digest(self) -> str:
        """Digest of the change: what was found of another change under this name counts no more."""
        change = "\0".join((self.file, self.function, self.old, self.new))
        return hashlib.sha256(change.encode()).hexdigest()[:16]

    def applied(self, text: str) -> str:
        """Return the text of the file with the mistake in it."""
        begin = self.begin(text)
        return text[:begin] + self.new + text[begin + len(self.old) :]

    def texts(self) -> dict[str, str]:
        """Return the files that it changes, with the mistake in them."""
        return {self.file: self.applied((ROOT / self.file).read_text())}

    def begin(self, text: str) -> int:
        """Return where its old text begins in the text of the file."""
        begin, end = _span(text, self.function) if self.function else (0, len(text))
        count = text[begin:end].count(self.old)
        if count != 1 or self.old == self.new:
            raise DoesNotApplyError(f"{self.name}: {self.file} has its old text {count} times in {self.function!r}.")
        return text.index(self.old, begin)

    def check(self, root: Path = ROOT) -> None:
        """Raise if it does not apply, or what comes of it is no Python."""
        path = root / self.file
        if not path.is_file():
            raise DoesNotApplyError(f"{self.name}: {self.file} is not there.")
        text = self.applied(path.read_text())
        if path.suffix == ".py":
            ast.parse(text)


def mutants_of(room: str) -> list[Mutant]:
    found: list[Mutant] = importlib.import_module(f"tests.mutants.rooms.{room}").MUTANTS
    return found


def every_mutant() -> dict[str, Mutant]:
    """Return all of them by ROOM/NAME."""
    return {f"{room}/{mutant.name}": mutant for room in room_names() for mutant in mutants_of(room)}


def room_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(rooms.__path__))


_tree = lru_cache(maxsize=4)(ast.parse)  # because: neighbours in a list are of one file


def _span(text: str, function: str) -> tuple[int, int]:
    """Return where a function or a class begins and ends in the text, with its decorators."""
    node: ast.AST = _tree(text)
    for name in function.split("."):
        inside = [
            child for child in ast.walk(node)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and child.name == name
        ]  # fmt: skip
        if not inside:
            raise DoesNotApplyError(f"There is no {function} any more.")
        node = inside[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return starts[first - 1], starts[node.end_lineno or node.lineno]
