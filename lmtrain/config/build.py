"""The builder of typed settings from plain data, which collects every problem. Called by compose and checkpoints.

Supported types: bool, int, float, str, Literal, tuple[X, ...], dict[str, X], X | None, a Settings class, a Choice (by
`kind`).
A field whose metadata names a unit ("count", "bytes", "seconds") also accepts a human size such as 300B.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from lmtrain import units
from lmtrain.config.base import FROM_A_PLUGIN, Choice, Settings, kinds, show
from lmtrain.config.names import Names, nearest_value, of_percent
from lmtrain.config.overrides import blended, quoted, shell
from lmtrain.errors import LayoutError, SettingsError, join_few, settings_error, spelling_hint

_READERS = {"count": units.parse_count, "bytes": units.parse_bytes, "seconds": units.parse_seconds}
_SIZES = {"count": "1000", "bytes": "512MiB", "seconds": "30min"}
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_PLURALS = {bool: "true or false", int: "whole numbers", float: "numbers", str: "texts"}
_EXAMPLES = {bool: "true", int: "1", float: "1.0", str: "TEXT"}
_INVALID = object()  # placeholder for a value whose problem is already recorded
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # because: file names cannot contain NUL, and UTF-8 cannot encode surrogates
_MOST = 10**18  # because: no quantity here is larger, and int64 in numpy and torch ends at 9.2e18


def quantity(unit: str, **kwargs: Any) -> Any:
    """Return a dataclass field that accepts numbers and human sizes.

    Usage: `steps: int = quantity("count", default=10)`.
    """
    return dataclasses.field(metadata={"unit": unit}, **kwargs)


S = TypeVar("S", bound=Settings)


def build_settings(cls: type[S], data: Any, prefix: str = "", *, names: Names | None = None) -> S:
    """Build settings of this class or raise one error that lists all problems.

    `names` adds suggestions for unknown keys from other groups and tools; without it, only keys of the same level are
    suggested.
    """
    builder = _Builder(names)
    result = builder.settings(cls, data, prefix)
    if builder.problems:
        raise settings_error(builder.problems)
    assert isinstance(result, cls)
    return result


class _Builder:
    def __init__(self, names: Names | None) -> None:
        self.names, self.problems = names, list[str]()

    def settings(self, cls: type[Settings], data: Any, path: str) -> Any:
        if not isinstance(data, dict):
            return self._refuse(
                f"{path}={show(data)} is not a group of settings. "
                + (self._choices(path) or f"Give its keys one by one: {path}.key=value.")
            )
        data = dict(data)
        if issubclass(cls, Choice):
            if (chosen := self._kind(cls, data.pop("kind", None), path)) is None:
                return _INVALID
            cls = chosen
        hints = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        before = len(self.problems)
        for name in data.keys() - fields.keys():
            self._unknown(_join(path, str(name)), data[name], fields)
        values: dict[str, Any] = {}
        for name, field in fields.items():
            where = _join(path, name)
            if name in data:
                values[name] = self._field(field, hints[name], data[name], where)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                self.problems.append(f"{where} is not set. {self._choices(where) or f'Add {where}=VALUE.'}")
        if len(self.problems) > before:
            right = {name: value for name, value in values.items() if value is not _INVALID}
            found = [problem.text() for problem in cls.problems_across(right)]
        else:
            try:
                return cls(**values)
            except (SettingsError, LayoutError) as error:
                found = list(error.problems)
        # the class of each problem (a str subclass) is kept, and its key becomes the full path
        self.problems.extend(type(problem)(_join(path, problem)) for problem in found)
        return _INVALID

    def _unknown(self, path: str, value: Any, beside: Mapping[str, Any]) -> None:
        """Record a problem for an unknown key. For an unknown group, record one problem per key typed under it."""
        if self.names is None:
            hint = spelling_hint(path.rpartition(".")[2], beside)
            self.problems.append(f"{path}={show(value)} is not a setting. {hint}")
            return
        inside = [(key, text) for key, text in self.names.typed.items() if key.startswith(f"{path}.")]
        for key, text in inside or [(path, self.names.typed.get(path, show(value)))]:
            self.problems.append(f"{key}={text} is not a setting. {self.names.way_out(key, text, beside)}")

    def _kind(self, base: type[Choice], kind: Any, path: str) -> type[Choice] | None:
        if base.kind:
            known = {base.kind: base}
            kind = kind or base.kind
        else:
            known = dict(kinds(base))
        if not isinstance(kind, str) or kind not in known:
            way_out = nearest_value(str(kind), known) + ("" if base.kind or kind is None else f" {FROM_A_PLUGIN}")
            self.problems.append(f"{_join(path, 'kind')}={show(kind)} is not a kind of {path}. {way_out}")
            return None
        return known[kind]

    def _field(self, field: dataclasses.Field[Any], hint: Any, value: Any, where: str) -> Any:
        if isinstance(value, str) and (unit := field.metadata.get("unit")):
            try:
                value = _READERS[unit](value)
            except ValueError as error:
                return self._refuse(f"{where}={value} {error}. Write {where}={_SIZES[unit]}.")
        default = field.default
        says_something = default not in (dataclasses.MISSING, None) and not isinstance(default, Settings)
        return self._value(hint, value, where, show(default) if says_something else "")

    def _value(self, hint: Any, value: Any, path: str, example: str = "") -> Any:
        origin = get_origin(hint)
        if origin in (Union, types.UnionType):
            if value is None and type(None) in get_args(hint):
                return None
            options = [h for h in get_args(hint) if h is not type(None)]
            if len(options) == 1:
                return self._value(options[0], value, path, example)
            for option in options:
                attempt = _Builder(self.names)
                made = attempt._value(option, value, path, example)
                if not attempt.problems:
                    return made
            return self._wrong(" or ".join(_name(option) for option in options), value, path, example)
        if origin is Literal:
            choices = get_args(hint)
            if any(value == choice and type(value) is type(choice) for choice in choices):
                return value
            return self._refuse(
                f"{path}={show(value)} is not a choice here. {nearest_value(str(value), map(str, choices))}"
            )
        if isinstance(hint, type) and issubclass(hint, Settings):
            return self.settings(hint, value, path)
        if origin is tuple:
            return self._list(hint, value, path, example)
        if origin is dict:
            if not isinstance(value, dict):
                return self._wrong(_name(hint), value, path, example or "{}")
            return {str(key): self._value(get_args(hint)[1], one, f"{path}.{key}") for key, one in value.items()}
        plain = _plain(hint, value)
        if plain is None and hint is str and self.names and (typed := self.names.typed.get(path)):
            as_text = f" As a text it is {shell(f'{path}={quoted(typed)}')}."
            return self._refuse(f"{path}={typed} is not a text.{blended(path, typed) or as_text}")
        if plain is None:
            share = of_percent(value) if hint is float else None
            return self._wrong(_name(hint), value, path, share or example or _EXAMPLES.get(hint, "VALUE"))
        if isinstance(plain, str) and (wrong := _NO_TEXT.search(plain)):
            zero = "a zero byte, which no text has. Take it out."
            half = f"half a character (U+{ord(wrong[0]):04X}), which UTF-8 has no bytes for. Give another name."
            return self._refuse(f"{path} holds {zero if wrong[0] == chr(0) else half}")
        if isinstance(plain, float) and not math.isfinite(plain):
            return self._refuse(f"{path}={show(value)} is not a finite number. Write {path}={example or 1}.")
        if isinstance(plain, int) and abs(plain) > _MOST:
            return self._refuse(f"{path}={show(value)} must be at most 1e18. Write {path}={example or 1}.")
        return plain

    def _list(self, hint: Any, value: Any, path: str, example: str) -> Any:
        inner = get_args(hint)[0]
        if not isinstance(value, (list, tuple)):
            return self._wrong(_name(hint), value, path, example or "[]")
        if isinstance(inner, type) and issubclass(inner, Settings):
            return tuple(self.settings(inner, one, f"{path}[{i}]") for i, one in enumerate(value))
        attempt = _Builder(None)
        made = tuple(attempt._value(inner, one, f"{path}[{i}]") for i, one in enumerate(value))
        if attempt.problems:
            return self._wrong(_name(hint), value, path, example or "[]")
        return made

    def _wrong(self, name: str, value: Any, path: str, example: str) -> Any:
        return self._refuse(f"{path}={show(value)} is not {name}. Write {path}={example}.")

    def _refuse(self, problem: str) -> Any:
        self.problems.append(problem)
        return _INVALID

    def _choices(self, path: str) -> str:
        """Return the sentence that lists the choices of a group; "" if `path` is not a group."""
        known = self.names.groups.get(path) if self.names else None
        return f"Choose one: {join_few([f'{path}={one}' for one in known])}." if known else ""


def _plain(hint: Any, value: Any) -> bool | int | float | str | None:
    """Return the value converted to this scalar type, or None if it is of another type."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and is_number and not (isinstance(value, float) and value.is_integer() is False):
        return int(value) if isinstance(value, int) or math.isfinite(value) else value
    if hint is float and is_number:
        return float(value) if abs(value) <= sys.float_info.max else math.inf
    if hint is str and (isinstance(value, str) or is_number):
        return str(value)
    return None


def _name(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a list of {_PLURALS.get(get_args(hint)[0], 'groups of settings')}"
    if get_origin(hint) is dict:
        return f"a mapping of names to {_PLURALS[get_args(hint)[1]]}"
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    return _NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
