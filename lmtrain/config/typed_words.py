"""What the words of a command line set, alone (`train.steps=20`) or within braces (`train={steps: 20}`). Torch-free.

Asked by everything that has to know whether a setting was typed. Nothing here knows what a key means.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

from lmtrain.config.parse_and_apply_overrides import FileSetting, override_key, override_text, parse_overrides
from lmtrain.config.settings_base import show
from lmtrain.errors import SettingsError


def typed_words(words: Sequence[str]) -> dict[str, str]:
    """Return dotted key -> value as text of everything that the words set. The keys within braces are among them: those
    of `train={steps: 20}` are train and train.steps. A word `~key`, which takes a setting away, gives it the text "".
    """
    typed: dict[str, str] = {}
    for word in words:
        key = override_key(word)
        typed[key] = word.partition("=")[2]
        typed |= {f"{key}.{inner}": show(value) for inner, value in _values_below(_braces(word))}
    return typed


def is_typed(words: Sequence[str], key: str) -> bool:
    """Return whether one of the words gives a value to the setting `key`; `~key` gives none."""
    return key in typed_words([word for word in words if not word.startswith("~")])


def typed_value(words: Sequence[str], key: str) -> Any:
    """Return the value that the last word which sets `key` gives it; None if none does, or if it gives several values
    for a sweep (KEY=A,B).
    """
    found = None
    for word in words:
        own = override_key(word)
        if own == key and "=" in word and not word.startswith("~"):
            (override,) = parse_overrides([word], {})
            found = None if override.is_sweep_override() else override.value()
        elif key.startswith(f"{own}."):
            found = dict(_values_below(_braces(word))).get(key.removeprefix(f"{own}."), found)
    return found


def without_settings(words: Sequence[str], keys: Collection[str]) -> list[str]:
    """Return the words without the settings `keys`. Where one of them is within braces, each of the other values there
    gets a word of its own.
    """
    groups = {key[:end] for key in keys for end, sign in enumerate(key) if sign == "."}
    leaves = (leaf for word in words for leaf in (_leaves(word) if override_key(word) in groups else [word]))
    return [word for word in leaves if override_key(word) not in keys]


def _leaves(word: str) -> list[str]:
    """Return a word for each value that is no dict within the braces of `word`; the word itself if it has none."""
    values = [pair for pair in _values_below(_braces(word)) if not (isinstance(pair[1], dict) and pair[1])]
    return [f"{override_key(word)}.{inner}={override_text(value)}" for inner, value in values] or [word]


def _braces(word: str) -> Any:
    """Return the value of a word as a dict if it is in braces, else None."""
    if not word.partition("=")[2].startswith("{"):
        return None
    if isinstance(word, FileSetting):
        return word.value
    with suppress(SettingsError):  # because: malformed words are refused where they are composed
        (override,) = parse_overrides([word], {})
        return None if override.is_sweep_override() else override.value()
    return None


def _values_below(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each key within the dict `value`, at any depth; `place` is put before each key."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield f"{place}{name}", inner
        yield from _values_below(inner, f"{place}{name}.")
