"""References between settings, `${other.key}`: checking their syntax and replacing them by values.

Called by compose and by readers of composed configs. References call no code and read nothing outside the settings:
resolvers such as `${oc.env:HOME}` are refused. Each reference is resolved once; text that comes out of a reference is
not parsed for further references.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lmtrain.config.base import show

Path = tuple[str | int, ...]
_REFERENCE = re.compile(r"(?<!\\)\$\{([^${}]*)\}")
_NAME = re.compile(r"\s*(\.*)([\w-]+(?:\.[\w-]+|\[\w+\])*)\s*")
_MAX_STEPS = 10_000  # because: chains of references can grow exponentially
_MAX_TEXT = 10_000
_MAX_VALUES = 50_000  # values inserted by references, in total
_MAX_WAY = 50


class ReferenceProblem(Exception):
    """A problem with a reference, and a way out; the caller adds the key that holds the reference."""


def problem_of(text: str) -> str | None:
    """Return the second half of a message about a malformed reference in `text`; None if all are well formed."""
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
    """Yield every value of a tree with its path, parents before children."""
    if path:
        yield path, node
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from values_of(value, (*path, key))


def shown_path(path: Path) -> str:
    """Return a path as text: ("data", "datasets", 0, "path") becomes "data.datasets[0].path"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def resolved(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of the tree with every reference replaced by its value, and the problems of those that failed."""
    one = _Resolver(tree)
    return one.inside(tree, (), ()), one.problems


class _Resolver:
    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree, self.problems, self.steps, self.brought = tree, list[str](), 0, 0

    def inside(self, node: Any, path: Path, way: tuple[str, ...]) -> Any:
        """Resolve a subtree. `path` is its place in the tree, `way` the chain of references followed to reach it."""
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
                raise  # because: the message must name the reference that the user wrote, which is the outermost
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
