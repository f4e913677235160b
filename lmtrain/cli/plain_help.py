"""How `--help` names what an option takes: in plain words, and not in Python's. Called by the command line's root.

Metavars that a verb gives stay; typer's own, such as `<int range>` or `<bool>`, are replaced for all verbs at once.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from typer.core import TyperGroup

_WORDS = {Path: "PATH", int: "N", float: "NUMBER"}


class PlainGroup(TyperGroup):
    """A group whose own options, and those of all verbs below it, are shown in plain words."""

    def get_params(self, ctx: Any) -> Any:
        return [_in_plain_words(param, None) for param in super().get_params(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        return found and _with_plain_words(found, ctx)


def takes(param: Any, hint: Any) -> str:
    """What stands behind an option's name: `N`, `PATH` or `{cpu,cuda}`, nothing for a flag; or an argument's name."""
    if param.metavar:
        return re.sub(r"^\[(.+)\]$", r"\1", str(param.metavar).removesuffix("..."))
    if param.param_type_name == "argument":
        return str(param.name).upper()
    if param.is_flag:
        return ""
    for option in (hint, *typing.get_args(hint)):
        if typing.get_origin(option) is Literal:
            return f"{{{','.join(map(str, typing.get_args(option)))}}}"
        for inner in (option, *typing.get_args(option)):
            if inner in _WORDS:
                return _WORDS[inner]
    return "TEXT"


def hints_of(command: Any) -> dict[str, Any]:
    """Types of a command's parameters. From the function: what click says of them changes with its versions."""
    return typing.get_type_hints(inspect.unwrap(command.callback)) if command.callback else {}


def examples(lines: Sequence[tuple[str, str]]) -> str:
    """An epilog of commands, each with what it does."""
    return "\n\n".join(("Examples:", *(f"* `{command}`: {what}" for command, what in lines)))


def _with_plain_words(command: Any, ctx: Any) -> Any:
    hints = hints_of(command)
    for param in command.get_params(ctx):
        _in_plain_words(param, hints.get(param.name))
    for verb in getattr(command, "commands", {}).values():
        _with_plain_words(verb, ctx)
    return command


def _in_plain_words(param: Any, hint: Any) -> Any:
    param.metavar = word = takes(param, hint)
    if param.param_type_name == "argument":
        # because: typer has no setting for these of an argument; a version that lacks one does not ask for it
        dots = "..." if param.nargs == -1 else ""
        usage = f"{word}{dots}" if param.required else f"[{word}]{dots}"
        vars(param).update(display_type_rich=lambda ctx: None, _usage_display_name=lambda: usage)
    vars(param)["_get_number_range_help_str"] = lambda: None  # "x>=1" beside N; a wrong number is told so
    return param
