"""Every option of every verb, found by walking the commands: so a new one cannot be overlooked.

Called by the tests. Hidden options and verbs are among them, for they are taken too. Other values are derived from an
option's type, where they can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer.main import get_command

from lmtrain.cli import subcommands
from lmtrain.cli.main import app

ROOT_COMMAND = "lmtrain"  # the verb of the options that stand before verbs
_OUTPUTS = ("output", "out", "html", "svg", "samples")  # parameters that name a file or folder to write


@dataclass(frozen=True)
class Option:
    verb: str  # such as "data show"
    name: str  # such as "--seed"; a flag's opposite is an option of its own
    hint: Any
    default: Any
    is_flag: bool
    is_output: bool
    least: float | None
    all_names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.verb} {self.name}"

    def other_values(self, now: str | None) -> list[list[str]]:
        """Return the words after the option's name, for each value other than `now`, which stands in the base command
        (None: the default is in use). Empty if no value can be derived.
        """
        if self.is_flag:
            return [[]]
        if choices := self._choices():
            return [[str(choice)] for choice in choices if str(choice) != str(self.default if now is None else now)]
        if self.is_output:
            path = Path(now or "new")
            return [[str(path.with_name(f"other_{path.name}"))]]
        number = self._other_number(now)
        return [] if number is None else [[number]]

    def _choices(self) -> tuple[Any, ...]:
        """Return the words of a Literal, or None-able Literal."""
        for hint in (self.hint, *get_args(self.hint)):
            if get_origin(hint) is Literal:
                return get_args(hint)
        return ()

    def _other_number(self, now: str | None) -> str | None:
        kinds = [hint for hint in (self.hint, *get_args(self.hint)) if hint in (int, float)]
        if not kinds or get_origin(self.hint) in (list, tuple):
            return None
        value = self.default if now is None else kinds[0](now)
        if value is None:
            return str(max(2, int(self.least or 0)))
        return str(value + 1) if kinds[0] is int else str(value / 2)


def every_option() -> list[Option]:
    commands = [(ROOT_COMMAND, get_command(app)), *every_verb()]
    return [option for verb, command in commands for option in _options(verb, command)]


def every_verb() -> Iterator[tuple[str, Any]]:
    """Yield each command and the words that call it, such as "data show"."""
    for name in subcommands.HELP:
        yield from _commands(name, subcommands.build_verb(name))


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
    else:
        for word, one in inner.items():
            yield from _commands(f"{name} {word}", one)


def _options(verb: str, command: Any) -> Iterator[Option]:
    hints = subcommands.parameter_types(command)
    for param in command.params:
        if param.param_type_name == "argument":
            continue
        for names in (param.opts, param.secondary_opts):
            if names:
                name = next((word for word in names if word.startswith("--")), names[0])
                yield Option(
                    verb, name, hints.get(param.name), param.default, bool(param.is_flag),
                    param.name in _OUTPUTS, param.min, tuple(names),
                )  # fmt: skip


def without(words: list[str], option: Option) -> tuple[list[str], str | None]:
    """Return a command line without this option, and the value that it had there."""
    for at, word in enumerate(words):
        if word in option.all_names:
            end = at + (1 if option.is_flag else 2)
            return words[:at] + words[end:], None if option.is_flag else words[at + 1]
        name, sign, value = word.partition("=")
        if sign and name in option.all_names:
            return words[:at] + words[at + 1 :], value
    return words, None
