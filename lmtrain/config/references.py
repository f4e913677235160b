"""References between settings, `${other.key}`: what may be written, and putting the values in their places.

Called by compose and its readers. Nothing is called and nothing outside the settings is read: `${oc.env:HOME}` and its
like are refused. A reference is read once, as it is written: what it brings is a value, and never another reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lmtrain.config.base import show

Path = tuple[str | int, ...]
_REFERENCE = re.compile(r"(?<!\\)\$\{([^${}]*)\}")
_NAME = re.compile(r"\s*(\.*)([\w-]+(?:\.[\w-]+|\[\w+\])*)\s*")
_MAX_STEPS = 10_000  # because: references to references can grow as fast as they like
_MAX_TEXT = 10_000
_MAX_VALUES = 50_000  # of those that references bring
_MAX_WAY = 50


class ReferenceProblem(Exception):
    """What is wrong with a reference and the way out, without the key that holds it."""


def problem_of(text: str) -> str | None:
    """Say what is wrong with a text in which something is meant for a reference and is none; see ReferenceProblem."""
    for match in _REFERENCE.finditer(text):
        if ":" in match[1]:
            return "calls a resolver. Use plain values or ${other.key} references."
        if not _NAME.fullmatch(match[1]):
            return f"refers to {match[1].strip() or 'nothing'!r}. Write ${{other.key}}."
    left = _REFERENCE.sub("\0", text).replace("\\${", "")
    if re.search(r"\$\{[^{}]*\0", left):
        return "has a reference within a reference. Name the key itself: ${other.key}."
    if "${" in left:
        return "opens a ${ that is not closed. Write ${other.key}, or \\${ for the signs themselves."
    return None


def values_of(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value of a tree with its place, a group before what is in it."""
    if path:
        yield path, node
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from values_of(value, (*path, key))


def shown_path(path: Path) -> str:
    """Return a path as people write it: ("data", "datasets", 0, "path") -> "data.datasets[0].path"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def resolved(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the tree with every reference replaced by its target, and the problems of those that have none."""
    one = _Resolver(tree)
    return one.inside(tree, (), ()), one.problems


class _Resolver:
    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree, self.problems, self.steps, self.brought = tree, list[str](), 0, 0

    def inside(self, node: Any, path: Path, way: tuple[str, ...]) -> Any:
        """`path` is where the value stands, `way` what was referred to on the way here."""
        self.brought += bool(way)
        if way and self.brought > _MAX_VALUES:
            raise ReferenceProblem(f"is one of those that bring more than {_MAX_VALUES} values. Write some out.")
        if isinstance(node, dict):
            return {key: self.inside(value, (*path, key), way) for key, value in node.items()}
        if isinstance(node, list):
            return [self.inside(value, (*path, index), way) for index, value in enumerate(node)]
        if not isinstance(node, str) or "${" not in node:
            return node
        try:
            return self.value(node, path, way)
        except ReferenceProblem as problem:
            if way:
                raise  # because: it is said of the reference that the user has written
            self.problems.append(f"{shown_path(path)}={node} {problem}")
            return node

    def value(self, text: str, path: Path, way: tuple[str, ...]) -> Any:
        if problem := problem_of(text):
            raise ReferenceProblem(problem)
        parts, end = list[str](), 0
        for match in _REFERENCE.finditer(text):
            found = self.found(match[1], path, way)
            if match[0] == text:
                return found
            if isinstance(found, (dict, list)):
                raise ReferenceProblem(f"puts {match[1].strip()}, which is not one value, into a text. Name a part.")
            parts += text[end : match.start()].replace("\\${", "${"), show(found)
            end = match.end()
            if sum(map(len, parts)) > _MAX_TEXT:
                raise ReferenceProblem(f"becomes longer than {_MAX_TEXT} characters. Write it out.")
        return "".join(parts) + text[end:].replace("\\${", "${")

    def found(self, inner: str, path: Path, way: tuple[str, ...]) -> Any:
        match = _NAME.fullmatch(inner)
        assert match is not None, "problem_of has seen it"
        self.steps += 1
        if self.steps > _MAX_STEPS:
            raise ReferenceProblem(f"is one of more than {_MAX_STEPS} references. Write some of them out.")
        base: Path = path[: len(path) - len(match[1])] if match[1] else ()
        at = (*base, *(int(word) if word.isdecimal() else word for word in re.findall(r"[\w-]+", match[2])))
        name = shown_path(at)
        if name in way or name == shown_path(path):
            raise ReferenceProblem(f"leads back to itself ({' -> '.join((*way, name))}). Give one of them a value.")
        if len(way) >= _MAX_WAY:
            raise ReferenceProblem(f"is reached over {_MAX_WAY} references. Refer to the value itself.")
        node: Any = self.tree
        for depth, word in enumerate(at):
            if isinstance(node, str) and "${" in node:
                node = self.value(node, at[:depth], (*way, name))
            if isinstance(node, dict) and str(word) in node:
                node = node[str(word)]
            elif isinstance(node, list) and isinstance(word, int) and word < len(node):
                node = node[word]
            else:
                raise ReferenceProblem(f"refers to {name}, which is not there. Name another key, or give the value.")
        return self.inside(node, at, (*way, name))
