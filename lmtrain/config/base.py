"""What a setting is: a frozen, keyword-only dataclass that checks itself. Torch-free.

Every room declares its settings in a `*_settings.py` file. A room with a choice (which model? which optimizer?)
derives a base from `Choice`; each alternative is a subclass with a `kind`, found by `kinds()` without a list to edit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lmtrain.errors import SettingsError


@dataclass(frozen=True)
class Problem:
    """One wrong setting in four parts: the key, its value, the rule, a way out."""

    key: str
    value: object
    rule: str
    way_out: str

    def text(self, prefix: str = "") -> str:
        key = f"{prefix}.{self.key}" if prefix else self.key
        return f"{key}={show(self.value)} {self.rule}. {self.way_out}"


def show(value: object) -> str:
    """A value as one would type it in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


@dataclass(frozen=True, kw_only=True)
class Settings:
    def __post_init__(self) -> None:
        problems = list(self.problems())
        if problems:
            raise SettingsError([p.text() for p in problems])

    def problems(self) -> Iterator[Problem]:
        """What is wrong within these settings alone; checks across settings live in train/config.py."""
        return iter(())

    @classmethod
    def problems_across(cls, parts: Mapping[str, Any]) -> Iterator[Problem]:
        """What is wrong between those parts that are each right: asked even when others are missing."""
        return iter(())

    def to_dict(self) -> dict[str, Any]:
        """Plain data that composes back to the same settings, `kind` included."""
        result: dict[str, Any] = {}
        if isinstance(self, Choice):
            result["kind"] = self.kind
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Settings):
                value = value.to_dict()
            elif isinstance(value, tuple):
                value = list(value)
            result[field.name] = value
        return result

    def digest(self) -> str:
        """A short name for exactly these values."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Choice(Settings):
    """Base of settings that come in kinds. `room` is the package whose *_settings.py files hold the kinds."""

    room: ClassVar[str]
    kind: ClassVar[str] = ""

    def component(self) -> Any:
        """The module that these settings are of: `lmtrain.models.gpt` for a kind in `lmtrain.models.gpt_settings`."""
        return importlib.import_module(type(self).__module__.removesuffix("_settings"))


def kinds(base: type[Choice]) -> dict[str, type[Choice]]:
    """Every kind of a choice, by its short word: the subclasses that stand in the room's settings files."""
    package = importlib.import_module(base.room)
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.endswith("_settings"):
            importlib.import_module(f"{base.room}.{module.name}")
    found: dict[str, type[Choice]] = {}
    todo = [base]
    while todo:
        cls = todo.pop()
        todo.extend(cls.__subclasses__())
        if cls.kind:
            found[cls.kind] = cls
    return dict(sorted(found.items()))


def problem_if(wrong: bool, key: str, value: object, rule: str, way_out: str) -> Iterator[Problem]:
    """`yield from problem_if(x < 1, ...)`: one line a check."""
    if wrong:
        yield Problem(key, value, rule, way_out)
