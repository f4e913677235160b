"""A line that was typed: settings in a notebook, or a whole command, whose class adds what its verb takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TypedLine:
    """A typed line in units: `verb` such as ("data", "show"), then one tuple for each option with its value, setting or
    argument.
    """

    verb: tuple[str, ...]
    units: tuple[tuple[str, ...], ...]
    takes_settings: bool
    options: frozenset[str]  # those that the verb has


def is_setting(word: str) -> bool:
    """Return whether a word is one that sets a value, KEY=VALUE, and no option."""
    return "=" in word and not word.startswith("-")
