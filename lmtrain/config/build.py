"""Plain data to typed settings, with every problem collected. Called by compose and by checkpoint readers.

Types understood: bool, int, float, str, Literal, tuple[X, ...], X | None, a Settings class, a Choice (by `kind`).
A field whose metadata names a unit ("count", "bytes", "seconds") also takes a human size such as 300B.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from lmtrain import units
from lmtrain.config.base import Choice, Settings, kinds, show
from lmtrain.errors import SettingsError, nearest

_READERS = {"count": units.parse_count, "bytes": units.parse_bytes, "seconds": units.parse_seconds}
_INVALID = object()  # stands in for a value whose problem has been noted


def quantity(unit: str, **kwargs: Any) -> Any:
    """A dataclass field that takes numbers and human sizes: `steps: int = quantity("count", default=10)`."""
    return dataclasses.field(metadata={"unit": unit}, **kwargs)


S = TypeVar("S", bound=Settings)


def build_settings(cls: type[S], data: Any, prefix: str = "") -> S:
    """Make settings of this class or raise one SettingsError that lists all that is wrong."""
    problems: list[str] = []
    result = _settings(cls, data, prefix, problems)
    if problems:
        raise SettingsError(problems)
    assert isinstance(result, cls)
    return result


def _settings(cls: type[Settings], data: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(data, dict):
        problems.append(f"{path}={show(data)} is not a group of settings. Give its keys one by one: {path}.key=value.")
        return _INVALID
    data = dict(data)
    if issubclass(cls, Choice):
        chosen = _kind(cls, data.pop("kind", None), path, problems)
        if chosen is None:
            return _INVALID
        cls = chosen
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    before = len(problems)
    for name in data.keys() - fields.keys():
        problems.append(f"{_join(path, name)}={show(data[name])} is not a setting. {nearest(name, fields)}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        where = _join(path, name)
        if name in data:
            value = data[name]
            if isinstance(value, str) and (unit := field.metadata.get("unit")):
                try:
                    value = _READERS[unit](value)
                except ValueError as error:
                    problems.append(f"{where}={value} {error}. Give a number or a size with its unit.")
                    continue
            values[name] = _value(hints[name], value, where, problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{where} is not set. Add {where}=VALUE.")
    if len(problems) > before:
        right = {name: value for name, value in values.items() if value is not _INVALID}
        problems.extend(_join(path, p.text()) for p in cls.problems_across(right))
        return _INVALID
    try:
        return cls(**values)
    except SettingsError as error:
        problems.extend(_join(path, p) for p in error.problems)
        return _INVALID


def _kind(base: type[Choice], kind: Any, path: str, problems: list[str]) -> type[Choice] | None:
    if base.kind:
        known = {base.kind: base}
        kind = kind or base.kind
    else:
        known = dict(kinds(base))
    if kind not in known:
        plugin = "" if base.kind or kind is None else " If it is a plugin's, add --plugin PACKAGE."
        way_out = nearest(str(kind), known) + plugin
        problems.append(f"{_join(path, 'kind')}={show(kind)} is not a kind of {path}. {way_out}")
        return None
    return known[kind]


def _value(hint: Any, value: Any, path: str, problems: list[str]) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        options = [h for h in get_args(hint) if h is not type(None)]
        if len(options) == 1:
            return _value(options[0], value, path, problems)
        for option in options:
            attempt: list[str] = []
            made = _value(option, value, path, attempt)
            if not attempt:
                return made
        names = " or ".join(_name(o) for o in options)
        problems.append(f"{path}={show(value)} is not {names}. Give {path} a value of that type.")
        return _INVALID
    if origin is Literal:
        if value in get_args(hint):
            return value
        problems.append(f"{path}={show(value)} is not a choice here. {nearest(str(value), map(str, get_args(hint)))}")
        return _INVALID
    if origin is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(_value(get_args(hint)[0], v, f"{path}[{i}]", problems) for i, v in enumerate(value))
    elif isinstance(hint, type) and issubclass(hint, Settings):
        return _settings(hint, value, path, problems)
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif hint is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif hint is str:
        if isinstance(value, str):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
    problems.append(f"{path}={show(value)} is not {_name(hint)}. Give {path} a value of that type.")
    return _INVALID


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _name(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a list of {_name(get_args(hint)[0])}"
    return _NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
