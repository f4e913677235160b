"""References between settings, `${other.key}`: checking their syntax and replacing them by values.

Called by compose and by readers of composed configs. References call no code and read nothing outside the settings:
resolvers such as `${oc.env:HOME}` are refused. Each reference is resolved once; text that comes out of a reference is
not parsed for further references.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lmtrain.config.settings_base import show

Path = tuple[str | int, ...]
_REFERENCE = re.compile(r"(?<!\\)\$\{([^${}]*)\}")
_NAME = re.compile(r"\s*(\.*)([\w-]+(?:\.[\w-]+|\[\w+\])*)\s*")
_MAX_REFERENCES = 10_000  # because: chains of references can grow exponentially
_MAX_CHARACTERS = 10_000
_MAX_VALUES = 50_000  # values inserted by references, in total
_MAX_CHAIN = 50


class ReferenceProblem(Exception):
    """A fault of a reference and how to correct it; the caller puts the key and its text before it."""


def reference_problem(text: str) -> str | None:
    """Check the syntax of the references `${key}` in a text. Return None if all are right, else the end of an error
    message, such as "The reference ${x:y} calls a resolver. Use plain values."
    """
    for match in _REFERENCE.finditer(text):
        if ":" in match[1]:
            return f"The reference {match[0]} calls a resolver. Use a plain value or ${{other.key}}."
        if not _NAME.fullmatch(match[1]):
            return f"The reference {match[0]} does not name a key. Write ${{other.key}}."
    remaining = _REFERENCE.sub("\0", text).replace("\\${", "")
    if re.search(r"\$\{[^{}]*\0", remaining):
        return "A reference may not contain another reference. Name the key itself: ${other.key}."
    if "${" in remaining:
        return "The value opens a ${ that is not closed. Write ${other.key}, or \\${ for the signs themselves."
    return None


def iter_values(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, value) for every value within nested dicts and lists, including inner dicts and lists, which come
    before their own values. A path is the tuple of keys and list indices that lead to the value; `path` is the one that
    leads to `node`.
    """
    if path:
        yield path, node
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from iter_values(value, (*path, key))


def path_text(path: Path) -> str:
    """Return a path as text: ("data", "datasets", 0, "path") becomes "data.datasets[0].path"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def resolve_references(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace every reference `${key}` in nested dicts by the value of that key. Return (a copy with the references
    replaced, error messages on references that failed).
    """
    resolver = _Resolver(tree)
    return resolver.resolve_subtree(tree, (), ()), resolver.problems


class _Resolver:
    """Resolves the references `${key}` of a tree of settings and collects `problems`; its counters enforce the limits
    at the top of this file.
    """

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree, self.problems, self.num_references, self.num_values = tree, list[str](), 0, 0

    def resolve_subtree(self, node: Any, path: Path, chain: tuple[str, ...]) -> Any:
        """Return a copy of `node`, a value in the settings tree at `path`, in which all references `${key}` are
        replaced by the values that they name. `chain` lists the keys of the references followed so far, to detect
        cycles.
        """
        self.num_values += bool(chain)
        if chain and self.num_values > _MAX_VALUES:
            raise ReferenceProblem(
                f"The references of these settings add up to more than {_MAX_VALUES} values. Write some out."
            )
        if isinstance(node, dict):
            return {key: self.resolve_subtree(value, (*path, key), chain) for key, value in node.items()}
        if isinstance(node, list):
            return [self.resolve_subtree(value, (*path, index), chain) for index, value in enumerate(node)]
        if not isinstance(node, str) or "${" not in node:
            return node
        try:
            return self.resolve_text(node, path, chain)
        except ReferenceProblem as problem:
            if chain:
                raise  # because: the message must name the reference that the user wrote, which is the outermost
            self.problems.append(f"{path_text(path)}={node}: {problem}")
            return node

    def resolve_text(self, text: str, path: Path, chain: tuple[str, ...]) -> Any:
        """Return `text` with its references `${key}` replaced by values. If the text is a single reference, return the
        value itself, of any type. `path` is the key of the text, and `chain` lists the keys of the references followed
        so far. Raise ReferenceProblem on a wrong reference or a cycle.
        """
        if problem := reference_problem(text):
            raise ReferenceProblem(problem)
        parts, end = list[str](), 0
        for match in _REFERENCE.finditer(text):
            target = self.look_up(match[1], path, chain)
            if match[0] == text:
                return target
            if isinstance(target, (dict, list)):
                raise ReferenceProblem(
                    f"{match[0]} stands inside a text, but {match[1].strip()} is a group or a list and not a single "
                    "value. Refer to one of its keys."
                )
            parts += text[end : match.start()].replace("\\${", "${"), show(target)
            end = match.end()
            if sum(map(len, parts)) > _MAX_CHARACTERS:
                raise ReferenceProblem(
                    f"With its references replaced, the value becomes longer than {_MAX_CHARACTERS} characters. Use "
                    "fewer references."
                )
        return "".join(parts) + text[end:].replace("\\${", "${")

    def look_up(self, reference: str, path: Path, chain: tuple[str, ...]) -> Any:
        """Return the value that a reference names, with references in it replaced. `reference` is an absolute key
        ("optim.lr") or begins with dots (".lr") and is relative to `path`, the key that holds it. `chain` lists the
        keys of the references followed so far. Raise ReferenceProblem on an unknown key or a cycle.
        """
        match = _NAME.fullmatch(reference)
        assert match is not None, "reference_problem has refused others"
        self.num_references += 1
        if self.num_references > _MAX_REFERENCES:
            raise ReferenceProblem(f"These settings have more than {_MAX_REFERENCES} references. Write values instead.")
        base: Path = path[: len(path) - len(match[1])] if match[1] else ()
        target = (*base, *(int(part) if part.isdecimal() else part for part in re.findall(r"[\w-]+", match[2])))
        name = path_text(target)
        if name in chain or name == path_text(path):
            cycle = " -> ".join((*chain, name))
            raise ReferenceProblem(f"The references lead back to their start ({cycle}). Give one key a value.")
        if len(chain) >= _MAX_CHAIN:
            raise ReferenceProblem(f"The value of {name} is {_MAX_CHAIN} references away. Refer to the value itself.")
        node: Any = self.tree
        for depth, part in enumerate(target):
            if isinstance(node, str) and "${" in node:
                node = self.resolve_text(node, target[:depth], (*chain, name))
            if isinstance(node, dict) and str(part) in node:
                node = node[str(part)]
            elif isinstance(node, list) and isinstance(part, int) and part < len(node):
                node = node[part]
            else:
                raise ReferenceProblem(f"The key {name} does not exist. Refer to another key, or give the value.")
        return self.resolve_subtree(node, target, (*chain, name))
