"""What a setting is: a frozen, keyword-only dataclass that checks itself. Torch-free.

Every room declares its settings in a `*_settings.py` file. A room with a choice (which model? which optimizer?)
derives a base from `Choice`; each alternative is a subclass with a `kind`, found by `kinds()` without a list to edit:
in the room, or in a package that `--plugin` names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

from lmtrain.errors import LayoutProblem, SettingsError, UsageError, refusal

PLUGIN_FILES = ("_settings", "_schedule", "_task")  # files of a plugin that are read at the start: torch-free

Check = tuple[bool, str, str, str]  # whether a key is wrong, the key, the rule, a way out


@dataclass(frozen=True)
class Problem:
    """One wrong setting in four parts: the key, its value, the rule, a way out."""

    key: str
    value: object
    rule: str
    way_out: str
    of_layout: bool = False  # not of one key: keys that are each right make a layout that cannot work

    def text(self, prefix: str = "") -> str:
        key = f"{prefix}.{self.key}" if prefix else self.key
        said = f"{key}={show(self.value)} {self.rule}. {self.way_out}"
        return LayoutProblem(said) if self.of_layout else said


@dataclass(frozen=True)
class GaveWay:
    """A setting that the command line leaves open and that was changed to fit what it says."""

    key: str
    value: object
    before: object
    cause: str

    def text(self) -> str:
        return f"{self.key}={show(self.value)} instead of {show(self.before)}, to fit {self.cause}."


def show(value: object) -> str:
    """Return a value as it is typed in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {show(one)}' for key, one in value.items())}}}"
    return str(value)


@dataclass(frozen=True, kw_only=True)
class Settings:
    def __post_init__(self) -> None:
        problems = list(self.problems())
        if problems:
            raise refusal([p.text() for p in problems])

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong within these settings alone; checks across settings are in train/config.py."""
        return iter(())

    def problem_if(self, wrong: bool, key: str, rule: str, way_out: str) -> Iterator[Problem]:
        value = getattr(self, key)
        return problem_if(wrong, key, list(value) if isinstance(value, tuple) else value, rule, way_out)

    def checked(self, *checks: Check) -> Iterator[Problem]:
        """`yield from self.checked((self.x == "", "x", "is empty", "Use y."), ...)`: a row for each check of a key."""
        for wrong, key, rule, way_out in checks:
            yield from self.problem_if(wrong, key, rule, way_out)

    def at_least(self, least: int, key: str, way_out: str) -> Check:
        """Return a check that a number is at least `least`; null passes if the key may be null."""
        value = getattr(self, key)
        return value is not None and value < least, key, f"must be at least {least}", way_out

    def at_most(self, most: int, key: str, way_out: str = "") -> Check:
        value = getattr(self, key)
        return value is not None and value > most, key, f"must be at most {most}", way_out or f"Use {most} or less."

    def above_0(self, key: str, way_out: str) -> Check:
        value = getattr(self, key)
        return value is not None and value <= 0, key, "must be above 0", way_out

    @classmethod
    def problems_across(cls, parts: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield what is wrong between parts that are right by themselves, also if other parts are missing."""
        return iter(())

    @classmethod
    def give_way(cls, tree: dict[str, Any], typed: Mapping[str, str]) -> list[GaveWay]:
        """Change, in plain data, what the command line leaves open and what cannot be beside what it says."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """Plain data that composes back to the same settings, `kind` included."""
        result: dict[str, Any] = {"kind": self.kind} if isinstance(self, Choice) else {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            plain = list(value) if isinstance(value, tuple) else value
            result[field.name] = value.to_dict() if isinstance(value, Settings) else plain
        return result

    def digest(self) -> str:
        """Return a short hash of exactly these values."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Choice(Settings):
    """Base of settings that come in kinds. `room` is the package whose files with this ending hold the kinds."""

    room: ClassVar[str]
    files: ClassVar[str] = "_settings"
    kind: ClassVar[str] = ""

    def component(self) -> Any:
        """Return the module of these settings: `lmtrain.models.gpt` for a kind in `lmtrain.models.gpt_settings`."""
        return importlib.import_module(type(self).__module__.removesuffix("_settings"))


FROM_A_PLUGIN = "If it is a plugin's, add --plugin PACKAGE."  # the other way out for a kind that nobody knows
plugins: dict[str, list[ModuleType]] = {}  # each package that --plugin has named, and its files below


def add_plugin(name: str) -> None:
    """Import a plugin package; its files count from now on as files of their rooms: see PLUGIN_FILES.

    Only the command line names plugins: no file does, since files must not decide what code runs.
    """
    try:
        package = importlib.import_module(name)
        inside = [f"{name}.{found.name}" for found in pkgutil.iter_modules(getattr(package, "__path__", ()))]
        plugins[name] = [package, *(importlib.import_module(file) for file in inside if file.endswith(PLUGIN_FILES))]
    except ImportError as error:
        raise UsageError(
            f"--plugin={name} cannot be imported: {error}. Install it, or put the folder it lies in on PYTHONPATH."
        ) from error


def modules(room: str, ending: str = "") -> Iterator[ModuleType]:
    """Yield the modules of a room whose names end with `ending`, then those of plugins."""
    yield from _room_modules(room, ending)
    for files in plugins.values():
        yield from files


@cache
def _room_modules(room: str, ending: str) -> list[ModuleType]:
    found = pkgutil.iter_modules(importlib.import_module(room).__path__)
    return [importlib.import_module(f"{room}.{one.name}") for one in found if one.name.endswith(ending)]


def kinds(base: type[Choice]) -> dict[str, type[Choice]]:
    """Return every kind of a choice by name: the subclasses in the room's files or in a plugin."""
    homes = {module.__name__ for module in modules(base.room, base.files)}
    found: dict[str, type[Choice]] = {}
    todo = [base]
    while todo:
        cls = todo.pop()
        todo.extend(cls.__subclasses__())
        if "kind" in vars(cls) and cls.__module__ in homes:
            other = found.setdefault(cls.kind, cls)
            if other is not cls:
                both = " and ".join(sorted((other.__module__, cls.__module__)))
                raise SettingsError([f"kind={cls.kind} is both in {both}. Give the plugin's another word."])
    return dict(sorted(found.items()))


def problem_if(wrong: bool, key: str, value: object, rule: str, way_out: str) -> Iterator[Problem]:
    """Yield a problem if `wrong`: for checks across settings, or a value that is shown in another form."""
    if wrong:
        yield Problem(key, value, rule, way_out)
