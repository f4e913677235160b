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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from lmtrain import units
from lmtrain.config.name_suggestions import ANOTHER_KIND, SettingNames, number_meant, suggest_value, union_members
from lmtrain.config.parse_and_apply_overrides import blend_hint, hydra_quoted, named_values, override_text
from lmtrain.config.settings_base import PLUGIN_WAY_OUT, Choice, Settings, kinds, setting, show, type_hints
from lmtrain.errors import (
    LayoutError,
    SettingsError,
    fill_in,
    leave_out,
    own,
    settings_error,
    spelling_hint,
    way,
    within_group,
)
from lmtrain.errors import example as show_example

_PARSERS = {"count": units.parse_count, "bytes": units.parse_bytes, "seconds": units.parse_seconds}
_SIZE_EXAMPLES = {"count": "1000", "bytes": "512MiB", "seconds": "30min"}
_TYPE_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_PLURAL_WORDS = {bool: "true or false", int: "whole numbers", float: "numbers", str: "texts"}
_EXAMPLES = {int: "1", float: "1.0"}
_BOOLEANS = {"yes": True, "on": True, "1": True, "1.0": True, "no": False, "off": False, "0": False, "0.0": False}
_OFF = ("false", "no", "off", "none", "null")  # words for the 0 of a number whose default is 0
_NO_EXAMPLES = ("", "[]", "{}")
_INVALID = object()  # placeholder for a value whose problem is already recorded
# because: file names cannot contain NUL, and UTF-8 cannot encode surrogates
_BAD_CHARACTER = re.compile("[\0\ud800-\udfff]")
_MAX_INT = 10**18  # because: no quantity here is larger, and int64 in numpy and torch ends at 9.2e18


def quantity(unit: str, **kwargs: Any) -> Any:
    """Return a dataclass field that accepts numbers and human sizes; the other arguments are those of `setting`.

    Usage: `steps: int = quantity("count", default=10)`.
    """
    return setting(metadata={"unit": unit}, **kwargs)


def required(way_out: str, **facts: Any) -> Any:
    """Return a dataclass field without a default. `way_out` is the advice to show if the setting is missing; `facts`
    are those of `setting`.
    """
    return setting(metadata={"way_out": way_out}, **facts)


S = TypeVar("S", bound=Settings)


def build_settings(cls: type[S], data: Any, prefix: str = "", *, names: SettingNames | None = None) -> S:
    """Build an instance of the settings class `cls` from `data`, nested dicts, converting and checking each value.
    Raise one SettingsError or LayoutError that lists all problems. `prefix` is the dotted key of `data` within the
    config, for messages. With `names`, a message on an unknown key also suggests keys of other groups and tools.
    """
    builder = _Builder(names)
    result = builder.build_group(cls, data, prefix)
    if builder.problems:
        raise settings_error(builder.problems)
    assert isinstance(result, cls)
    return result


class _Builder:
    """Converts plain data to settings. Methods return _INVALID after recording a problem. `path` is a dotted key, and
    `hint` the type hint of the settings field.
    """

    def __init__(self, names: SettingNames | None, *, advises: bool = True) -> None:
        self.names, self.advises, self.problems = names, advises, list[str]()

    def build_group(self, cls: type[Settings], data: Any, path: str) -> Any:
        """Build an instance of the settings class `cls` from `data`, a dict of its keys. If anything is wrong, append
        messages to `self.problems` and return _INVALID. `path` is the dotted key of the group, "" for the whole config.
        """
        if not isinstance(data, dict):
            return self._record(
                f"{path}={show(data)} is not a group of settings. "
                + (self._choices_sentence(path) or f"Give its keys one by one: {path}.KEY=VALUE.")
            )
        data = dict(data)
        if issubclass(cls, Choice):
            if (chosen := self._choose_class(cls, data.pop("kind", None), path)) is None:
                return _INVALID
            cls = chosen
        data = cls.from_older(data)
        hints = type_hints(cls)  # type: ignore[arg-type]  # because: mypy takes a class for a value without a hash
        fields = {f.name: f for f in dataclasses.fields(cls)}
        before = len(self.problems)
        for name in data.keys() - fields.keys():
            self._report_unknown_key(_join_key(path, str(name)), data[name], fields)
        needed = [
            name for name, field in fields.items()
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ]  # fmt: skip
        # because: what this kind needs is not missing where another is meant
        if any(ANOTHER_KIND in problem for problem in self.problems[before:]):
            needed = []
        given = [f"{path}.{name}" for name in data if name in fields]
        if len(needed) > len(given) and (choices := self._choices_sentence(path)):
            given = given or [f"{path}.kind={getattr(cls, 'kind', '')}"]
            return self._record(f"{', '.join(given)} alone is no {path}. {choices}")
        values: dict[str, Any] = {}
        for name, field in fields.items():
            where = _join_key(path, name)
            if name in data:
                values[name] = self._build_field(field, hints[name], data[name], where)
            elif name in needed:
                add = f"Add {fill_in(f'{where}=VALUE')}."
                way_out = field.metadata.get("way_out") or self._choices_sentence(where) or add
                self.problems.append(f"{where} is not set. {way_out}")
        if len(self.problems) > before:
            valid = {name: value for name, value in values.items() if value is not _INVALID}
            messages = [problem.text() for problem in cls.problems_across(valid)]
        else:
            try:
                return cls(**values)
            except (SettingsError, LayoutError) as error:
                messages = list(error.marked_problems)
        # the class of each problem (a str subclass) is kept, and its key becomes the full path
        self.problems.extend(type(problem)(within_group(path, problem)) for problem in messages)
        return _INVALID

    def _report_unknown_key(self, path: str, value: Any, known_keys: Mapping[str, Any]) -> None:
        """Append the message that the dotted key `path` is not a setting to `self.problems`, with a suggestion from
        `known_keys`, the valid keys of its group. If the user typed keys below `path`, append one message for each of
        these instead.
        """
        if self.names is None:
            group, _, key = path.rpartition(".")
            hint = spelling_hint(key, known_keys, lambda near: way(f"{group}.{near}={show(value)}", instead_of=path))
            self.problems.append(f"{path}={show(value)} is not a setting. {hint}")
            return
        typed_below = [(key, text) for key, text in self.names.typed.items() if key.startswith(f"{path}.")]
        for key, text in typed_below or [(path, self.names.typed.get(path, show(value)))]:
            self.problems.append(self.names.refusal(key, text, known_keys))

    def _choose_class(self, base: type[Choice], kind: Any, path: str) -> type[Choice] | None:
        """Return the subclass of `base` whose `kind` is this one. If there is none, append a message about the group
        `path` to `self.problems` and return None.
        """
        if base.kind:
            classes = {base.kind: base}
            kind = kind or base.kind
        else:
            classes = dict(kinds(base))
        if kind is None and (choices := self._choices_sentence(path)):
            self.problems.append(f"{path} is not set. {choices}")
            return None
        if not isinstance(kind, str) or kind not in classes:
            plugin = "" if base.kind or kind is None else f" {PLUGIN_WAY_OUT}"
            way_out = f"{suggest_value(str(kind), classes, own)}{plugin}"
            self.problems.append(f"{_join_key(path, 'kind')}={show(kind)} is not a kind of {path}. {way_out}")
            return None
        return classes[kind]

    def _build_field(self, field: dataclasses.Field[Any], hint: Any, value: Any, path: str) -> Any:
        """Convert `value` to the type hint of a settings field and return it; a text such as "300B" or "4h" is parsed
        first if the field's metadata names a unit. If it does not fit, append a message to `self.problems` and return
        _INVALID.
        """
        is_off = field.default == 0 and type(field.default) is int and show(value).lower() in _OFF
        meant = "0" if is_off else field.metadata.get("meant", {}).get(show(value).strip().lower())
        if meant is not None and self.advises:
            return self._record(f"{path}={show(value)} is not {_type_words(hint)}. Write {way(f'{path}={meant}')}.")
        if isinstance(value, str) and (unit := field.metadata.get("unit")):
            try:
                value = _PARSERS[unit](value)
            except ValueError as error:
                return self._record(f"{path}={error}. {self._advise(hint, value, path, _SIZE_EXAMPLES[unit])}")
        default = field.default
        has_example = default not in (dataclasses.MISSING, None) and not isinstance(default, Settings)
        example = field.metadata.get("example") or (show(default) if has_example else "")
        return self._build_value(hint, value, path, example)

    def _build_value(self, hint: Any, value: Any, path: str, example: str = "") -> Any:
        """Convert `value` to the type `hint` and return it. If it does not fit, append a message to `self.problems` and
        return _INVALID. `path` is the dotted key, and `example` a valid value to show in the message.
        """
        origin = get_origin(hint)
        if hint is Any:
            return value  # because: it is checked later, as a part of other settings
        if origin in (Union, types.UnionType):
            if value is None and type(None) in get_args(hint):
                return None
            options = [h for h in get_args(hint) if h is not type(None)]
            is_off = isinstance(value, str) and value.lower() in _OFF and str not in options
            if self.advises and is_off and len(options) < len(get_args(hint)):
                return self._refuse_type(hint, value, path, example)
            if len(options) == 1:
                return self._build_value(options[0], value, path, example)
            for option in options:
                attempt = _Builder(self.names, advises=False)
                result = attempt._build_value(option, value, path, example)
                if not attempt.problems:
                    return result
            return self._refuse_type(hint, value, path, example)
        if origin is Literal:
            choices = get_args(hint)
            if any(value == choice and type(value) is type(choice) for choice in choices):
                return value
            return self._record(
                f"{path}={show(value)} is not an allowed value. {suggest_value(show(value), map(str, choices), own)}"
            )
        if isinstance(hint, type) and issubclass(hint, Settings):
            return self.build_group(hint, value, path)
        if origin is tuple:
            return self._build_tuple(hint, value, path, example)
        if origin is dict:
            if not isinstance(value, dict):
                if mapping := _mapping_of(hint, value):
                    return self._record(
                        f"{path}={show(value)} is not {_type_words(hint)}. Write {way(f'{path}={mapping}')}."
                    )
                return self._refuse_type(hint, value, path, example)
            inner = get_args(hint)[1]
            for key in value if isinstance(inner, type) and issubclass(inner, Settings) else ():
                if not isinstance(value[key], dict) and key in typing.get_type_hints(inner):
                    item = f"{key}={show(value[key])}"
                    return self._record(f"{path}.{item} lacks the name of one of the {path}. Write {path}.NAME.{item}.")
            return {str(key): self._build_value(inner, item, f"{path}.{key}") for key, item in value.items()}
        scalar = _to_scalar(hint, value)
        if scalar is None and hint is str and self.names and (typed := self.names.typed.get(path)):
            as_text = f" To give it as a text, type {way(f'{path}={hydra_quoted(typed)}')}."
            return self._record(f"{path}={typed} is not a text.{blend_hint(path, typed) or as_text}")
        if scalar is None:
            return self._refuse_type(hint, value, path, example or _EXAMPLES.get(hint, ""))
        if isinstance(scalar, str) and (bad := _BAD_CHARACTER.search(scalar)):
            zero = "a zero byte, which a text cannot contain. Remove it."
            half = f"half a character (U+{ord(bad[0]):04X}), which UTF-8 cannot encode. Give another value."
            return self._record(f"{path} holds {zero if bad[0] == chr(0) else half}")
        number = f"Give a number, such as {show_example(example or 1)}."
        if isinstance(scalar, float) and not math.isfinite(scalar):
            return self._record(f"{path}={show(value)} is not a finite number. {number}")
        if isinstance(scalar, int) and abs(scalar) > _MAX_INT:
            limit = "at most 1e18" if scalar > 0 else "at least -1e18"
            return self._record(f"{path}={show(value)} must be {limit}. {number}")
        return scalar

    def _build_tuple(self, hint: Any, value: Any, path: str, example: str) -> Any:
        """Convert a list to the type `hint`, a tuple[X, ...], and return it. If it does not fit, append a message to
        `self.problems` and return _INVALID. `path` is the dotted key, and `example` a valid value to show in the
        message.
        """
        inner = get_args(hint)[0]
        if not isinstance(value, (list, tuple)):
            return self._refuse_type(hint, value, path, example)
        if isinstance(inner, type) and issubclass(inner, Settings):
            return tuple(self.build_group(inner, item, f"{path}[{i}]") for i, item in enumerate(value))
        attempt = _Builder(None, advises=False)
        items = tuple(attempt._build_value(inner, item, f"{path}[{i}]") for i, item in enumerate(value))
        if attempt.problems:
            return self._refuse_type(hint, value, path, example)
        return items

    def _refuse_type(self, hint: Any, value: Any, path: str, example: str) -> Any:
        """Record that the value at `path` is not of the type `hint`, and return _INVALID. `example` is a valid value,
        or "".
        """
        rule = f"is not {_type_words(hint)}"
        return self._record(f"{path}={show(value)} {rule}. {self._advise(hint, value, path, example)}")

    def _advise(self, hint: Any, value: Any, path: str, example: str) -> str:
        """Return the advice for a value of the wrong type: the value of the type `hint` that says the same, such as
        [0.1] for 0.1, or else to give another, with `example` shown.
        """
        # because: the values that are tried here are refused in this way too
        for meant, text in _values_meant(hint, value) if self.advises else ():
            attempt = _Builder(None, advises=False)
            if attempt._build_value(hint, meant, path) is not _INVALID and not attempt.problems:
                return f"Write {way(f'{path}={text}')}."
        if str(value).lower() in ("auto", "default"):
            return f"Nothing is chosen by this word. {leave_out(path)} for the default, or give {_type_words(hint)}."
        shows = bool not in union_members(hint) and example not in _NO_EXAMPLES
        value_of_type = fill_in(f"{path}=VALUE", shown=_type_words(hint))
        return f"Give {value_of_type}{f', such as {show_example(example)}' if shows else ''}."

    def _record(self, problem: str) -> Any:
        """Record a problem and return _INVALID."""
        self.problems.append(problem)
        return _INVALID

    def _choices_sentence(self, path: str) -> str:
        """Return the sentence on how to choose from a group; "" if `path` is not a group."""
        if not self.names or path not in self.names.groups:
            return ""
        return f"Choose one with {fill_in(f'{path}=NAME')}; `lmtrain config list {path}` lists them."


def _to_scalar(hint: Any, value: Any) -> bool | int | float | str | None:
    """Convert `value` to the type `hint`: bool, int, float or str. Return None if `value` does not fit it: for example,
    numbers become texts and 2.0 becomes 2, but 2.5 does not become an int, nor a text a number.
    """
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


def _values_meant(hint: Any, value: Any) -> Iterator[tuple[Any, str]]:
    """Yield values that may say in the type `hint` what `value`, of another type, was to say; each with its text."""
    options = {option for option in union_members(hint) if option is not type(None)}
    word = str(value).strip().lower()
    if type(None) in union_members(hint) and word in (*_OFF, ""):
        yield None, "null"
    if value is None and any(get_origin(option) is Literal and "all" in get_args(option) for option in options):
        yield "all", "all"
    if bool in options and word in _BOOLEANS:
        yield _BOOLEANS[word], show(_BOOLEANS[word])
    if isinstance(value, str) and {int, float} & options:
        with suppress(ValueError):
            yield (count := units.parse_count(value.rstrip(",;"))), str(count)
        if float in options and (number := number_meant(value)):
            yield float(number), number
    if isinstance(value, dict) and len(value) == 1:
        [only] = value.values()
        yield only, override_text(only)
    if isinstance(value, list) and len(value) == 1:
        yield value[0], override_text(value[0])
    if any(get_origin(option) is tuple for option in options) and word in _OFF:
        yield [], "[]"
    if any(get_origin(option) is tuple for option in options) and not isinstance(value, (list, dict)):
        entries = [part.strip() for part in value.split(",")] if isinstance(value, str) else [value]
        yield entries, override_text(entries)


def _mapping_of(hint: Any, value: Any) -> str:
    """Return a text or a list of texts, given in place of a mapping of names to texts, as such a mapping; else ""."""
    texts = [value] if isinstance(value, str) else value
    if get_args(hint)[1] is not str or not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return ""
    return named_values(texts) if texts and all(map(str.strip, texts)) else ""


def _type_words(hint: Any) -> str:
    """Describe a type hint in words for an error message, such as "a list of whole numbers"."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_type_words(option) for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is tuple:
        return f"a list of {_PLURAL_WORDS.get(get_args(hint)[0], 'groups of settings')}"
    if get_origin(hint) is dict:
        return f"a mapping of names to {_PLURAL_WORDS.get(get_args(hint)[1], 'settings')}"
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    return _TYPE_WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _join_key(path: str, name: str) -> str:
    """Return the dotted key of `name` in the group at `path`; "" is the root."""
    return f"{path}.{name}" if path else name
