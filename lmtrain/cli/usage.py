"""A wrong command line in our words: the option, verb or setting that was meant, as one types it.

Called by main where typer refuses, and where the system does. Whatever typer calls its errors, they carry what is used
here: a message, the context of the command, and of an unknown option its name.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from lmtrain.errors import LmtrainError, MissingInputError, OutputError, StorageError, UsageError, nearest
from lmtrain.runtime.files.limits import limit_reached

# because: typer brings click with it under a name of its own, or asks for the package, depending on its version
Refused: type[Exception] = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")
_PROCESSES = ("num_processes", "num_gpus", "gpus", "devices", "n_gpus")
_CANNOT_READ = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
_RULES = {"valid integer": "is not a whole number", "valid number": "is not a number"}
_WRONG_NAME = (errno.ENAMETOOLONG, errno.EINVAL)


def explained(error: Any, words: Sequence[str]) -> LmtrainError:
    """What typer has refused, as an error of ours with a way out."""
    context = getattr(error, "ctx", None)
    command = command_of(context) if context is not None else " ".join(["lmtrain", *words[:1]])
    help_ = f"`{command} --help` shows how it is called."
    message = error.format_message().strip()
    if option := getattr(error, "option_name", None) if hasattr(error, "possibilities") else None:
        return UsageError(f"{option} is not an option of {command}. {_option_meant(option, command, error, words)}")
    if match := re.match(r"No such command ['\"](.*?)['\"]", message):
        verbs = getattr(getattr(context, "command", None), "commands", {})
        return UsageError(f"{command} {match[1]} is not a command. {nearest(match[1], verbs)}")
    if match := re.search(r"['\"](\S*)['\"] is not one of (.+?)\.?$", message):
        from lmtrain.config.names import near_value

        near = near_value(match[1], re.findall(r"['\"](\S+?)['\"]", match[2]))
        return UsageError(f"{_stopped(message)} {f'Did you mean {near}?' if near else help_}")
    if match := re.match(r"Invalid value for ['\"](--?[\w-]+).*?['\"]: (.*)", message):
        rule = next((said for sign, said in _RULES.items() if sign in match[2]), f"is refused: {match[2]}")
        return UsageError(f"{_stopped(f'{match[1]} {_value_of(match[1], words)} {rule}')} {help_}")
    return UsageError(f"{_stopped(message)} {help_}")


def of_system(error: OSError) -> LmtrainError:
    """What nothing nearer to the cause has explained."""
    file, reason = error.filename or "a file", error.strerror or str(error)
    if reached := limit_reached(error, Path(str(file))):
        return StorageError(f"Reading or writing {file} failed: {reached}")
    if error.errno == errno.EAGAIN:
        return StorageError(
            f"A process or a thread could not be started: {reason}. End other processes, or raise `ulimit -u`."
        )
    if error.errno in _WRONG_NAME:
        return UsageError(f"{str(file)[:100]}... cannot be a file: {reason}. Give a shorter or another name.")
    if error.errno in _CANNOT_READ:
        return MissingInputError(f"{file} cannot be opened: {reason}. Check the path; --debug shows who asked.")
    if error.errno in (errno.EROFS, errno.EEXIST, errno.ENOTEMPTY):
        return OutputError(f"{file} cannot be written: {reason}. Choose another output.")
    return StorageError(f"Reading or writing {file} failed: {reason}. Check the disk; --debug shows who asked.")


def command_of(context: Any) -> str:
    """Such as "lmtrain data show", whatever started it."""
    words: list[str] = []
    while context is not None and context.parent is not None:
        words.insert(0, str(context.info_name))
        context = context.parent
    return " ".join(["lmtrain", *words])


def _stopped(message: str) -> str:
    message = " ".join(message.split())
    return message if message.endswith((".", "?")) else f"{message}."


def _option_meant(option: str, command: str, error: Any, words: Sequence[str]) -> str:
    """Another option, or the setting that another tool has as an option."""
    near = list(error.possibilities or ())
    name = option.lstrip("-").lower().replace("-", "_")
    takes_settings = any(param.name == "overrides" for param in error.ctx.command.params)
    surely = difflib.get_close_matches(option, near, n=1, cutoff=0.8)
    if takes_settings and not surely:
        typed = _settings_meant(option, name, words)
        if typed:
            return f"Settings are words without dashes: type {' or '.join(typed)}."
        if name in _PROCESSES:
            return "Did you mean --nproc?"
    return f"Did you mean {' or '.join(surely or near)}?" if near else f"`{command} --help` lists its options."


def _value_of(option: str, words: Sequence[str]) -> str:
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option and not after.startswith("--") and "=" not in after:
            return after
    return ""


def _settings_meant(option: str, name: str, words: Sequence[str]) -> list[str]:
    from lmtrain.config.compose import group_choices
    from lmtrain.config.names import Names
    from lmtrain.train.config import RunConfig

    value = _value_of(option, words) or "true"
    groups = group_choices()
    chosen = [f"{group}={name}" for group, choices in groups.items() if name in choices]
    return chosen or Names(RunConfig, groups).meant(name, value)
