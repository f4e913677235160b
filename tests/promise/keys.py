"""Every key that a run's settings have, found by walking the classes: so a new one cannot be overlooked.

Called by the test of completeness. A key has the word of the kind it belongs to, where its group comes in kinds.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin

from lmtrain.config.settings_base import Choice, Settings, kinds
from lmtrain.train.run_config import RunConfig


class Key(NamedTuple):
    kind: str  # gpt, adamw, ..., or nothing for a group that has no kinds
    name: str  # as it is typed: model.width

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})" if self.kind else self.name


def every_key() -> dict[Key, tuple[Any, ...]]:
    """Each key, and the words that it chooses among, or nothing where it takes any number or text."""
    return dict(_keys(RunConfig, "", ""))


def _keys(cls: type[Settings], path: str, kind: str) -> Iterator[tuple[Key, tuple[Any, ...]]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, hint = f"{path}{field.name}", hints[field.name]
        inner = _settings_in(hint)
        if inner is None or path:
            chosen = field.metadata.get("kinds")
            yield Key(kind, name), tuple(ours(chosen)) if chosen else words(hint)
        if inner is None:
            continue
        if not issubclass(inner, Choice):
            yield from _keys(inner, f"{name}.", kind)
            continue
        yield Key("", f"{name}.kind"), tuple(ours(inner))
        for word, one in ours(inner).items():
            yield from _keys(one, f"{name}.", word)


def ours(base: type[Choice]) -> dict[str, type[Choice]]:
    """Without those of a plugin that another test may have brought."""
    return {word: cls for word, cls in kinds(base).items() if cls.__module__.startswith("lmtrain.")}


def _settings_in(hint: Any) -> type[Settings] | None:
    """The settings class in a hint, in `X | None` and in a list of X."""
    for option in (hint, *get_args(hint)):
        if isinstance(option, type) and issubclass(option, Settings):
            return option
    return None


def words(hint: Any) -> tuple[Any, ...]:
    if hint is bool:
        return (False, True)
    return get_args(hint) if get_origin(hint) is Literal else ()
