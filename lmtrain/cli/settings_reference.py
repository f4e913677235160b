"""The page of settings: every key of a run with its type, default and meaning. Called by `reference.py`.

Keys and types come from the dataclasses, meanings from the comments of conf/*.yaml, so that neither is said twice.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from lmtrain.config.base import Choice, Settings, kinds, show
from lmtrain.config.compose import conf_dir, group_choices

_INTRO = """# Settings

Every key can be given on the command line as `key=value`, groups as `group=choice`; see
[how settings work](../explanation/settings.md). A key without a default must be given. Counts take human sizes
such as `10M` and `300B`.
"""
_WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_UNITS = {"count": "count", "bytes": "bytes", "seconds": "seconds"}


def settings_page(cls: type[Settings] | None = None) -> str:
    if cls is None:
        from lmtrain.train.config import RunConfig as cls
    assert cls is not None
    hints = typing.get_type_hints(cls)
    parts = [_INTRO, *(part for name in hints if (part := "\n".join(_section(name, hints[name]))))]
    return "\n".join(parts)


def _section(name: str, hint: Any) -> Iterator[str]:
    cls = settings_class(hint)
    if cls is None:
        return
    yield f"## {name}\n"
    if doc := _own_doc(cls):
        yield f"{doc}\n"
    choices = group_choices().get(name.replace(".", "/"), [])
    if choices:
        yield f"Choices: {', '.join(f'`{name}={choice}`' for choice in choices)}.\n"
    if issubclass(cls, Choice) and not cls.kind:
        for word, kind in kinds(cls).items():
            yield f"### {name}, kind {word}\n"
            if doc := _own_doc(kind):
                yield f"{doc}\n"
            yield from _table(name, kind)
    else:
        yield from _table(name, cls)


def _table(name: str, cls: type[Settings]) -> Iterator[str]:
    rows = list(_rows(name, cls, Meanings(name, getattr(cls, "kind", ""))))
    if rows:
        yield "\n".join(["| Key | Type | Default | Meaning |", "|---|---|---|---|", *rows]) + "\n"
    else:
        yield "No keys of its own.\n"


def _rows(path: str, cls: type[Settings], meanings: Meanings) -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, hint = f"{path}.{field.name}", hints[field.name]
        default, meaning = meanings.of(key, _default(field))
        meaning = meaning if meanings.is_sure(key) else _source_comment(cls, field.name) or meaning
        chosen, unit = field.metadata.get("kinds"), _UNITS.get(field.metadata.get("unit", ""))
        words = ", ".join(f"`{word}`" for word in kinds(chosen)) if chosen else type_words(hint, unit)
        yield f"| `{key}` | {words} | {default} | {meaning.replace('|', '&#124;')} |"
        inner = settings_class(hint)
        if inner is not None and not (issubclass(inner, Choice) and not inner.kind):
            yield from _rows(key, inner, meanings)


def settings_class(hint: Any) -> type[Settings] | None:
    """The settings class in a hint, also in `X | None`."""
    for option in (hint, *get_args(hint)):
        if isinstance(option, type) and issubclass(option, Settings):
            return option
    return None


def type_words(hint: Any, unit: str | None = None) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        names = [type_words(h, unit) for h in get_args(hint) if h is not type(None)]
        return " or ".join([*names, "null"] if type(None) in get_args(hint) else names)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if origin is tuple:
        return f"list of {type_words(get_args(hint)[0], unit)}s"
    if isinstance(hint, type) and issubclass(hint, Settings):
        return "group"
    return unit or _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return ""
    if isinstance(value, Settings):
        return ""
    return f"`{show(list(value) if isinstance(value, tuple) else value)}`"


def _source_comment(cls: type, name: str) -> str:
    """The comment beside a field, in whichever class of the family declares it."""
    for owner in cls.__mro__:
        if name in inspect.get_annotations(owner):
            match = re.search(rf"^ +{name}: .*?  # (.+)$", inspect.getsource(owner), re.MULTILINE)
            return match[1].replace("None:", "null:") if match else ""
    return ""


def _own_doc(cls: type) -> str:
    """The class's docstring, unless it is the signature that dataclasses make up."""
    doc = cls.__dict__.get("__doc__") or ""
    return "" if doc.startswith(f"{cls.__name__}(") else " ".join(doc.split())


class Meanings:
    """Defaults and comments from conf/: a group's own files first, then the root config."""

    def __init__(self, group: str, kind: str) -> None:
        root = YamlFile(conf_dir() / "pretrain.yaml")
        folder = conf_dir() / group.replace(".", "/")
        files = [YamlFile(path) for path in sorted(folder.glob("*.yaml"))] if folder.is_dir() else []
        files = [file for file in files if not kind or file.values.get("kind") == kind]
        # because: one file of a group is one choice of many; only a lone choice and the root config name a default
        self._defaults = {
            f"{group}.{k}": v for k, v in (files[0].values if len(files) == 1 else {}).items()
        } | root.values
        self._comments = {key: [text] for key, text in root.comments.items()}
        for file in files:
            for key, text in file.comments.items():
                self._comments.setdefault(f"{group}.{key}", []).append(text)

    def of(self, key: str, default: str) -> tuple[str, str]:
        value = self._defaults.get(key)
        said = self._comments.get(key, [""])
        return (default if value is None else f"`{value}`"), max(said, key=said.count)

    def is_sure(self, key: str) -> bool:
        """Where the files of a group differ, a comment may speak of that file's value and not of the key."""
        return len(set(self._comments.get(key, []))) == 1


class YamlFile:
    """The dotted keys of a YAML file with their plain values and their comments: beside the key, or right above it."""

    def __init__(self, path: Path) -> None:
        self.values: dict[str, str] = {}
        self.comments: dict[str, str] = {}
        above: list[str] = []
        parents: list[tuple[int, str]] = []  # indentation and name of every key that is still open
        for line in path.read_text(encoding="utf-8").splitlines():
            text = line.strip()
            if text.startswith("#"):
                above.append(text.lstrip("# "))
                continue
            name, colon, rest = text.partition(":")
            if not text or not colon or not name.replace("_", "").isalnum():
                above = []
                continue
            indent = len(line) - len(line.lstrip())
            parents = [*((i, n) for i, n in parents if i < indent), (indent, name)]
            key = ".".join(n for _, n in parents)
            value, _, beside = f"{rest} ".partition(" #")
            if value.strip():
                self.values[key] = value.strip()
            if comment := beside.strip() or " ".join(above):
                self.comments[key] = comment
            above = []
