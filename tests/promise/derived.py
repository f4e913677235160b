"""Proofs of the keys of a kind that proofs.py does not name: values as another kind's proof has, or as its types allow.

Called by proofs.py, so that a new model, optimizer or schedule needs no line there. A key that no value is thought of
for gets no proof, and the test of completeness asks for one.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmtrain.config.compose_run_settings import conf_dir
from lmtrain.config.settings_base import Choice
from lmtrain.config.strict_yaml import read_yaml
from lmtrain.errors import LmtrainError
from tests.promise.bench import BASE, Settings, config_of, tree_of
from tests.promise.keys import ours, words


def fitting(group: str, base: type[Choice], word: str) -> dict[str, Any]:
    """The small run with this kind, and those of its settings that this kind has too."""
    keys = {f"{group}.{field.name}" for field in dataclasses.fields(ours(base)[word])}
    shared = {key: value for key, value in BASE.items() if not key.startswith(f"{group}.") or key in keys}
    return {key: value for key, value in shared.items() if key != group} | {group: _file(group, word)}


def proven_by_kind(
    group: str, base: type[Choice], proven: Mapping[tuple[str, str], Sequence[Any]]
) -> Iterator[tuple[str, str, Sequence[Any], Settings]]:
    """The kind, a key, values to tell apart and settings to have them in: for each key that is not proven already."""
    known = {key: values for (_, key), values in proven.items()}
    for word, cls in ours(base).items():
        missing = [field.name for field in dataclasses.fields(cls) if (word, f"{group}.{field.name}") not in proven]
        for key in (f"{group}.{name}" for name in missing):
            on = fitting(group, base, word)
            values = known.get(key, ())
            if not values or not all(_accepted(on, key, value) for value in values):
                values = _values(typing.get_type_hints(cls)[key.split(".")[1]], key, on)
            if len(values) > 1:
                yield word, key, values, on


def _file(group: str, word: str) -> str:
    """The config of a kind: the one of its name, else the first."""
    files = sorted((conf_dir() / group).glob("*.yaml"), key=lambda path: (path.stem != word, path.stem))
    return next(path.stem for path in files if read_yaml(path).data.get("kind") == word)


def _values(hint: Any, key: str, on: Settings) -> tuple[Any, ...]:
    group, name = key.split(".")
    now = tree_of(on)[group][name]
    if choices := words(hint):
        return choices
    return (now, *(value for value in _others(now) if value != now and _accepted(on, key, value)))[:2]


def _others(now: Any) -> Iterator[Any]:
    if isinstance(now, list):
        yield from ([other, *now[1:]] for other in _others(now[0])) if now else ()
    elif isinstance(now, int):
        yield from (2 * now, now + 1, now // 2)
    elif now is None or isinstance(now, float):
        yield from (4, 0.5) if now is None else (now / 2, 0.5, 2 * now)


def _accepted(on: Settings, key: str, value: Any) -> bool:
    try:
        return bool(config_of({**on, key: value}))
    except LmtrainError:
        return False
