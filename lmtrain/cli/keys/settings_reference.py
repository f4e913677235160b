"""Every key of a run with its type, default and meaning, and the page of them. Torch-free.

Called by `reference.py`, `lmtrain config` and shell completion. Keys and types come from the dataclasses, meanings from
the comments of conf/*.yaml, so that neither is said twice.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args, get_origin

from lmtrain.config.base import Choice, Settings, kinds, show
from lmtrain.config.compose import conf_dir, group_choices
from lmtrain.config.setting_names import union_members
from lmtrain.config.yaml_file import MAX_BYTES

_INTRO = """# Settings

Every key can be given on the command line as `key=value`, groups as `group=choice`; see
[how settings work](../explanation/settings.md). A key without a default must be given. Counts take human sizes
such as `10M` and `300B`.
"""
_WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def config_file(group: str, name: str, config_dir: Path | None = None) -> Path | None:
    """Return the config file of a choice; the user's folder comes before ours."""
    roots = [*([config_dir] if config_dir else []), conf_dir()]
    return next((path for root in roots if (path := root / group / f"{name}.yaml").is_file()), None)


def default_choices() -> dict[str, str]:
    """Return the choice that conf/pretrain.yaml makes in each group."""
    text = (conf_dir() / "pretrain.yaml").read_text(encoding="utf-8")
    return {group: name for group, name in re.findall(r"^  - (\w+): (\w+)", text, re.MULTILINE) if name != "null"}


def part_of_root(name: str) -> tuple[Path, str] | None:
    """Return the text of a part of the root config that is no group, such as `train`, and its file."""
    path = conf_dir() / "pretrain.yaml"
    found = re.search(rf"^{re.escape(name)}:\n(?: .*\n|\n)+", path.read_text(encoding="utf-8"), re.MULTILINE)
    return (path, found[0].rstrip() + "\n") if found else None


def text_of(path: Path) -> str:
    """Return the text of a config, at most as much as a config may have."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES).decode("utf-8", errors="replace")


def headline(path: Path) -> str:
    """Return a config's description: the first comment line at its top, or the comment beside its kind."""
    for line in text_of(path).splitlines():
        if not line.startswith("# @package"):
            return line.lstrip("# ") if line.startswith("#") else CommentedFile(path).comments.get("kind", "")
    return ""


class CommentedFile:
    """The dotted keys of a YAML file with their plain values and their comments: beside the key, or right above it."""

    def __init__(self, path: Path) -> None:
        self.values: dict[str, str] = {}
        self.comments: dict[str, str] = {}
        above: list[str] = []
        parents: list[tuple[int, str]] = []  # indentation and name of every key that is still open
        for line in text_of(path).splitlines():
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


@dataclass(frozen=True)
class Key:
    """One setting, and what is said of it."""

    name: str  # as typed: optim.lr
    kind: str  # the kind of its group that has it; "" where the group comes in one kind
    types: str  # in words
    default: str  # as typed; "" where it has none
    meaning: str
    values: tuple[str, ...]  # all that it can be, where they can be counted


@dataclass(frozen=True)
class Section:
    """A part of a run's settings, such as `optim`: of one kind, or a choice of several."""

    name: str
    base: type[Settings]
    kinds: dict[str, type[Settings]]  # by their words; the word is "" where there is one kind

    def keys(self, kind: str) -> Iterator[Key]:
        """Yield the keys of a kind; keys of nested settings follow their parents."""
        cls = self.kinds[kind]
        return _keys(self.name, cls, Meanings(self.name, getattr(cls, "kind", "")), kind)


def sections() -> dict[str, Section]:
    from lmtrain.train.config import RunConfig

    return {
        name: Section(name, inner, dict(kinds(inner)) if _is_choice(inner) else {"": inner})
        for name, hint in typing.get_type_hints(RunConfig).items()
        if (inner := settings_class(hint))
    }


def _is_choice(cls: type[Settings]) -> TypeGuard[type[Choice]]:
    """Return whether a class stands for several kinds and is none of them."""
    return issubclass(cls, Choice) and not cls.kind


def known_keys() -> dict[str, list[Key]]:
    """Return every setting by its name, once for each kind that has it."""
    found: dict[str, list[Key]] = {}
    for name, section in sections().items():
        if "" not in section.kinds:
            words = tuple(section.kinds)
            meaning = f"of which kind it is; {name}=NAME chooses one with its settings"
            found[f"{name}.kind"] = [Key(f"{name}.kind", "", ", ".join(words), "", meaning, words)]
        for key in (key for kind in section.kinds for key in section.keys(kind)):
            found.setdefault(key.name, []).append(key)
    return found


def settings_page() -> str:
    return "\n".join([_INTRO, *(line for section in sections().values() for line in _section(section))])


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.name}\n"
    if doc := _own_doc(section.base):
        yield f"{doc}\n"
    if choices := group_choices().get(section.name):
        yield f"Choices: {', '.join(f'`{section.name}={choice}`' for choice in choices)}.\n"
    for kind, cls in section.kinds.items():
        if kind:
            yield f"### {section.name}, kind {kind}\n"
            if doc := _own_doc(cls):
                yield f"{doc}\n"
        lines = [
            f"| `{key.name}` | {key.types} | {f'`{key.default}`' if key.default else ''} | "
            f"{key.meaning.replace('|', '&#124;')} |"
            for key in section.keys(kind)
        ]
        head = ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
        yield "\n".join([*head, *lines] if lines else ["No keys of its own."]) + "\n"


def _keys(path: str, cls: type[Settings], meanings: Meanings, kind: str) -> Iterator[Key]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, hint = f"{path}.{field.name}", hints[field.name]
        default, meaning = meanings.of(name, _default(field))
        meaning = meaning if meanings.is_sure(name) else _source_comment(cls, field.name) or meaning
        chosen, unit = field.metadata.get("kinds"), field.metadata.get("unit")
        words = ", ".join(f"`{word}`" for word in kinds(chosen)) if chosen else type_words(hint, unit)
        yield Key(name, kind, words, default, meaning, tuple(kinds(chosen)) if chosen else _values(hint))
        inner = settings_class(hint)
        if inner is not None and not _is_choice(inner):
            yield from _keys(name, inner, meanings, kind)


def _values(hint: Any) -> tuple[str, ...]:
    """Return all values of a type, as typed; nothing if they cannot be listed."""
    found = {
        option: ("true", "false") if option is bool else ("null",) if option is type(None) else
        tuple(map(str, get_args(option))) if get_origin(option) is Literal else ()
        for option in union_members(hint)
    }  # fmt: skip
    return tuple(word for words in found.values() for word in words) if all(found.values()) else ()


def settings_class(hint: Any) -> type[Settings] | None:
    """Return the settings class in a type hint, also in `X | None`."""
    options = (one for one in (hint, *get_args(hint)) if isinstance(one, type) and issubclass(one, Settings))
    return next(options, None)


def type_words(hint: Any, unit: str | None = None) -> str:
    origin, options = get_origin(hint), union_members(hint)
    if options != (hint,):
        names = [type_words(one, unit) for one in options if one is not type(None)]
        return " or ".join([*names, "null"] if type(None) in options else names)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if origin is tuple:
        return f"list of {type_words(get_args(hint)[0], unit)}s"
    if origin is dict:
        return f"{type_words(get_args(hint)[1], unit)}s by name"
    if isinstance(hint, type) and issubclass(hint, Settings):
        return "group"
    return unit or _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _default(field: dataclasses.Field[Any]) -> str:
    """Return a field's default as it is typed; an empty text if it has none."""
    made = field.default_factory
    value = field.default if made is dataclasses.MISSING else made()
    return "" if value is dataclasses.MISSING or isinstance(value, Settings) else show(value)


def _source_comment(cls: type, name: str) -> str:
    """Return the comment beside a field, from the class that declares it."""
    for owner in cls.__mro__:
        if name in inspect.get_annotations(owner):
            match = re.search(rf"^ +{name}: .*?  # (.+)$", inspect.getsource(owner), re.MULTILINE)
            return match[1].replace("None:", "null:") if match else ""
    return ""


def _own_doc(cls: type) -> str:
    """Return a class's docstring, unless it is the signature that dataclasses generate."""
    doc = cls.__dict__.get("__doc__") or ""
    return "" if doc.startswith(f"{cls.__name__}(") else " ".join(doc.split())


class Meanings:
    """Defaults and comments from conf/: a group's own files first, then the root config."""

    def __init__(self, group: str, kind: str) -> None:
        root = CommentedFile(conf_dir() / "pretrain.yaml")
        folder = conf_dir() / group.replace(".", "/")
        files = [CommentedFile(path) for path in sorted(folder.glob("*.yaml"))] if folder.is_dir() else []
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
        said = self._comments.get(key, [""])
        return self._defaults.get(key, default), max(said, key=said.count)

    def is_sure(self, key: str) -> bool:
        """Return whether all files of a group have the same comment, which then describes the key and not a value."""
        return len(set(self._comments.get(key, []))) == 1
