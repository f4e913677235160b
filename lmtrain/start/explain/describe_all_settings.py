"""The settings of a run with type, default and meaning. Torch-free.

Used by the reference pages, `lmtrain config` and shell completion. Keys and types are read from the dataclasses,
meanings from the comments of conf/*.yaml, so that each is written only once.
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

from lmtrain.config.compose_run_settings import conf_dir
from lmtrain.config.name_suggestions import union_members
from lmtrain.config.settings_base import Choice, Settings, kinds, show
from lmtrain.config.strict_yaml import MAX_BYTES

_TYPE_WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def default_choices() -> dict[str, str]:
    """Return the choice that conf/pretrain.yaml makes in each group."""
    text = (conf_dir() / "pretrain.yaml").read_text(encoding="utf-8")
    return {group: name for group, name in re.findall(r"^  - (\w+): (\w+)", text, re.MULTILINE) if name != "null"}


def root_section(name: str) -> tuple[Path, str] | None:
    """Return the path of conf/pretrain.yaml and the part of its text that sets the top-level key `name`, such as
    "train". Return None if it has no such key with keys below it.
    """
    path = conf_dir() / "pretrain.yaml"
    match = re.search(rf"^{re.escape(name)}:\n(?: .*\n|\n)+", path.read_text(encoding="utf-8"), re.MULTILINE)
    return (path, match[0].rstrip() + "\n") if match else None


def read_config_text(path: Path) -> str:
    """Return the text of a config file, cut at the maximal size of a config."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES).decode("utf-8", errors="replace")


def config_headline(path: Path) -> str:
    """Return the one-line description of a config file: the comment in its first line (after a `# @package` line), or
    else the comment beside its key `kind`; "" without either.
    """
    for line in read_config_text(path).splitlines():
        if not line.startswith("# @package"):
            return line.lstrip("# ") if line.startswith("#") else CommentedFile(path).comments.get("kind", "")
    return ""


class CommentedFile:
    """The values and comments of a YAML file by dotted key; a comment is beside its key or right above it."""

    def __init__(self, path: Path) -> None:
        self.values: dict[str, str] = {}
        self.comments: dict[str, str] = {}
        above: list[str] = []
        parents: list[tuple[int, str]] = []  # indentation and name of every key that is still open
        for line in read_config_text(path).splitlines():
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
            value, _, trailing = f"{rest} ".partition(" #")
            if value.strip():
                self.values[key] = value.strip()
            if comment := trailing.strip() or " ".join(above):
                self.comments[key] = comment
            above = []


@dataclass(frozen=True)
class Key:
    """A setting, with what the reference page shows about it."""

    name: str  # as typed: optim.lr
    kind: str  # the kind of its section that has it; "" if the section has only one kind
    types: str  # in words
    default: str  # as typed; "" if it has none
    meaning: str
    values: tuple[str, ...]  # all allowed values, if they can be listed

    @property
    def section(self) -> str:
        """The top-level section of the setting, such as optim."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Section:
    """A top-level section of a run's settings, such as `optim`, with its kinds (such as adamw and lamb)."""

    name: str
    base: type[Settings]
    kinds: dict[str, type[Settings]]  # kind name -> class; the name is "" if there is only one
    has_names: bool = False  # True if it holds several groups of the same settings, each by a name: stages

    def keys(self, kind: str) -> Iterator[Key]:
        """Yield a Key for each setting that the section has when its kind is `kind`, one of the names in `self.kinds`.
        The keys of nested settings follow the key that holds them.
        """
        cls = self.kinds[kind]
        comments = ConfigComments(self.name, getattr(cls, "kind", ""))
        return _iter_keys(f"{self.name}.NAME" if self.has_names else self.name, cls, comments, kind)


def settings_sections() -> dict[str, Section]:
    """Return a dict that maps the name of each top-level group of a run's settings, such as "optim", to its Section."""
    from lmtrain.train.run_config import RunConfig

    return {
        name: Section(name, inner, dict(kinds(inner)) if _is_choice(inner) else {"": inner}, get_origin(hint) is dict)
        for name, hint in typing.get_type_hints(RunConfig).items()
        if (inner := settings_class(hint))
    }


def _is_choice(cls: type[Settings]) -> TypeGuard[type[Choice]]:
    """Return True for the base class of several kinds, False for a kind itself or other settings."""
    return issubclass(cls, Choice) and not cls.kind


def all_keys() -> dict[str, list[Key]]:
    """Return a dict that maps the dotted name of every setting to its Key entries: one, or several if the setting's
    section has several kinds (such as optimizers) and more than one of them has this key.
    """
    keys: dict[str, list[Key]] = {}
    for name, section in settings_sections().items():
        if "" not in section.kinds:
            kind_names = tuple(section.kinds)
            meaning = f"of which kind it is; {name}=NAME chooses one with its settings"
            keys[f"{name}.kind"] = [Key(f"{name}.kind", "", ", ".join(kind_names), "", meaning, kind_names)]
        for key in (key for kind in section.kinds for key in section.keys(kind)):
            keys.setdefault(key.name, []).append(key)
    return keys


def _iter_keys(path: str, cls: type[Settings], comments: ConfigComments, kind: str) -> Iterator[Key]:
    """Yield a Key for each field of the settings class `cls` and of the settings classes nested in it. `path` is the
    dotted name of the section, `kind` the name of the choice that `cls` implements ("" if the section has only one),
    and `comments` supplies defaults and meanings.
    """
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, hint = f"{path}.{field.name}", hints[field.name]
        default, meaning = comments.default_and_meaning(name, _default_text(field))
        meaning = meaning if comments.describes_key(name) else _source_comment(cls, field.name) or meaning
        choice_base, unit = field.metadata.get("kinds"), field.metadata.get("unit")
        types = ", ".join(f"`{word}`" for word in kinds(choice_base)) if choice_base else describe_type(hint, unit)
        values = tuple(kinds(choice_base)) if choice_base else _allowed_values(hint)
        yield Key(name, kind, types, default, meaning, values)
        inner = settings_class(hint)
        if inner is not None and not _is_choice(inner):
            yield from _iter_keys(name, inner, comments, kind)


def _allowed_values(hint: Any) -> tuple[str, ...]:
    """Return all values that a type hint allows, as a user types them, such as ("true", "false", "null"). Return () if
    they are not a finite list, as for numbers and texts.
    """
    values_by_type = {
        option: ("true", "false") if option is bool else ("null",) if option is type(None) else
        tuple(map(str, get_args(option))) if get_origin(option) is Literal else ()
        for option in union_members(hint)
    }  # fmt: skip
    if not all(values_by_type.values()):
        return ()
    return tuple(value for values in values_by_type.values() for value in values)


def settings_class(hint: Any) -> type[Settings] | None:
    """Return the settings class in a type hint, also in `X | None`."""
    return next((cls for cls in (hint, *get_args(hint)) if isinstance(cls, type) and issubclass(cls, Settings)), None)


def describe_type(hint: Any, unit: str | None = None) -> str:
    """Return a type hint in words, such as "whole number or null". `unit`, if given, is the word for a single value in
    place of "number", "text" and the like.
    """
    origin, options = get_origin(hint), union_members(hint)
    if options != (hint,):
        names = [describe_type(option, unit) for option in options if option is not type(None)]
        return " or ".join([*names, "null"] if type(None) in options else names)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if origin is tuple:
        return f"list of {describe_type(get_args(hint)[0], unit)}s"
    if origin is dict:
        return "settings" if get_args(hint)[1] is Any else f"{describe_type(get_args(hint)[1], unit)}s by name"
    if isinstance(hint, type) and issubclass(hint, Settings):
        return "group"
    return unit or _TYPE_WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _default_text(field: dataclasses.Field[Any]) -> str:
    """Return a settings field's default as a user would type it, such as "null"; "" if the field must be set or holds
    nested settings.
    """
    factory = field.default_factory
    value = field.default if factory is dataclasses.MISSING else factory()
    return "" if value is dataclasses.MISSING or isinstance(value, Settings) else show(value)


def _source_comment(cls: type, name: str) -> str:
    """Return the comment at the end of the line that defines field `name` in the source code of class `cls`, or of the
    base class that declares it, or else in the line above; "" if there is none.
    """
    for owner in cls.__mro__:
        if name in inspect.get_annotations(owner):
            line = rf"^(?: +# (.+)\n)? +{name}: .*?(?:  # (.+))?$"
            match = re.search(line, inspect.getsource(owner), re.MULTILINE)
            return (match[2] or match[1] or "").replace("None:", "null:") if match else ""
    return ""


class ConfigComments:
    """Defaults and comments from conf/: a group's own files first, then the root config."""

    def __init__(self, group: str, kind: str) -> None:
        root = CommentedFile(conf_dir() / "pretrain.yaml")
        folder = conf_dir() / group.replace(".", "/")
        files = [CommentedFile(path) for path in sorted(folder.glob("*.yaml"))] if folder.is_dir() else []
        files = [file for file in files if not kind or file.values.get("kind") == kind]
        # because: a file of a group is one of many choices; only a single choice or the root config states a default
        self._defaults = {
            f"{group}.{k}": v for k, v in (files[0].values if len(files) == 1 else {}).items()
        } | root.values
        self._comments = {key: [text] for key, text in root.comments.items()}
        for file in files:
            for key, text in file.comments.items():
                self._comments.setdefault(f"{group}.{key}", []).append(text)

    def default_and_meaning(self, key: str, default: str) -> tuple[str, str]:
        """Return a key's default, from conf/ or else `default`, and its most frequent comment."""
        said = self._comments.get(key, [""])
        return self._defaults.get(key, default), max(said, key=said.count)

    def describes_key(self, key: str) -> bool:
        """Return True if all files have the same comment for a key, which then describes the key and not a value."""
        return len(set(self._comments.get(key, []))) == 1
