"""The command `lmtrain`: its own options, errors and exit codes.

Verbs live in files beside this one, are listed in verbs.py, and import what they need when they run, so that
`lmtrain --help` is quick.
"""

from __future__ import annotations

import atexit
import difflib
import errno
import gc
import os
import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from lmtrain import __version__
from lmtrain.cli.screen.terminal import echo, print_error
from lmtrain.cli.verbs import VerbGroup
from lmtrain.errors import LmtrainError, MissingInputError, OutputError, StorageError, UsageError, spelling_hint
from lmtrain.runtime.files.limits import limit_reached

# because: typer brings click with it under a name of its own, or asks for the package, depending on its version
Refused: type[Exception] = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")
_CANNOT_READ = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
_RULES = {"valid integer": "is not a whole number", "valid number": "is not a number"}
_WRONG_NAME = (errno.ENAMETOOLONG, errno.EINVAL)


def explained(error: Any, words: Sequence[str]) -> LmtrainError:
    """Turn an error of typer into one of ours, with a way out."""
    context = getattr(error, "ctx", None)
    command = command_of(context) if context is not None else " ".join(["lmtrain", *words[:1]])
    help_ = f"`{command} --help` shows how it is called."
    message = error.format_message().strip()
    if option := getattr(error, "option_name", None) if hasattr(error, "possibilities") else None:
        takes_settings = any(param.name == "overrides" for param in error.ctx.command.params)
        if takes_settings:
            from lmtrain.cli.keys.foreign import whole_line

            if said := whole_line(command, error, words):
                return UsageError(said)
        way_out = _option_meant(option, command, error, words, takes_settings)
        return UsageError(f"{option} is not an option of {command}. {way_out}")
    if match := re.match(r"No such command ['\"](.*?)['\"]", message):
        verbs = getattr(getattr(context, "command", None), "commands", {})
        return UsageError(f"{command} {match[1]} is not a command. {spelling_hint(match[1], verbs)}")
    if match := re.search(r"['\"](\S*)['\"] is not one of (.+?)\.?$", message):
        from lmtrain.config.names import closest_value

        near = closest_value(match[1], re.findall(r"['\"](\S+?)['\"]", match[2]))
        return UsageError(f"{_stopped(message)} {f'Did you mean {near}?' if near else help_}")
    if match := re.match(r"Invalid value for ['\"](--?[\w-]+).*?['\"]: (.*)", message):
        rule = next((said for sign, said in _RULES.items() if sign in match[2]), f"is refused: {match[2]}")
        return UsageError(f"{_stopped(f'{match[1]} {_value_of(match[1], words)} {rule}')} {help_}")
    return UsageError(f"{_stopped(message)} {help_}")


def of_system(error: OSError) -> LmtrainError:
    """Turn an error of the operating system that nothing else has handled into one of ours."""
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
    """Return the command's full name, such as "lmtrain data show"."""
    words: list[str] = []
    while context is not None and context.parent is not None:
        words.insert(0, str(context.info_name))
        context = context.parent
    return " ".join(["lmtrain", *words])


def _stopped(message: str) -> str:
    message = " ".join(message.split())
    return message if message.endswith((".", "?")) else f"{message}."


def _option_meant(option: str, command: str, error: Any, words: Sequence[str], takes_settings: bool) -> str:
    """Another option, or the setting that another tool has as an option."""
    known = list(error.possibilities or ())  # because: what click takes for near is often far
    near = [one for one in known if one.startswith(option)] or difflib.get_close_matches(option, known, cutoff=0.7)
    name = option.lstrip("-").lower().replace("-", "_")
    surely = difflib.get_close_matches(option, near, n=1, cutoff=0.8)
    if takes_settings and not surely:
        from lmtrain.cli.keys.foreign import PROCESSES
        from lmtrain.config.names import UNSUPPORTED_SETTINGS

        if name in PROCESSES and any("--nproc" in param.opts for param in error.ctx.command.params):
            return "Did you mean --nproc?"
        if name in UNSUPPORTED_SETTINGS:
            return UNSUPPORTED_SETTINGS[name]
        if typed := _settings_meant(option, name, words):
            return f"Settings are words without dashes: type {' or '.join(typed)}."
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
    from lmtrain.config.names import SettingNames
    from lmtrain.train.config import RunConfig

    value = _value_of(option, words) or "true"
    groups = group_choices()
    chosen = [f"{group}={name}" for group, choices in groups.items() if name in choices]
    return chosen or SettingNames(RunConfig, groups).suggest_overrides(name, value)


app = typer.Typer(
    name="lmtrain",
    cls=VerbGroup,
    help="Pretrain language models end to end: text, datasets, training, checkpoints, evaluation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        echo(f"lmtrain {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; works after a verb too.")
    ] = False,
) -> None:
    """Options that stand before the verb; `--debug` is taken out of the command line in `main`."""


def main(arguments: list[str] | None = None) -> None:
    """Run the console script. A user's error is one message on stderr; `--debug` anywhere adds its traceback."""
    code = 1  # of what is no error of a user
    ending = _Ending()
    if arguments is None:
        atexit.register(ending)  # because: handlers run last to first, and all that are registered later come before it
    try:
        _main(arguments)
        ending.code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else code
        ending.code = 0 if end.code is None else code
        raise
    finally:
        # because: a process that has no torch has no peers
        if groups := sys.modules.get("lmtrain.runtime.processes.process_group"):
            groups.end_at_once(code)


class _Ending:
    """The last handler of a process that has imported torch: end it at once, with the exit code that it has anyway.

    because: Python would free every object of torch one by one, which takes a CPU second
    """

    code: int | None = None  # None for an exception that Python reports

    def __call__(self) -> None:
        if self.code is None or "torch" not in sys.modules:
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            return  # because: Python reports what cannot be written, and exits with 120
        os._exit(self.code)


def _main(arguments: list[str] | None) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # because: a file's name may be no text of the terminal's
    words = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in words
    arguments = [word for word in words if word != "--debug"]
    # because: a vocabulary is some hundred thousand objects that stay; looking at them over and over for cycles took a
    # tenth of a start
    gc.set_threshold(100_000, 20, 20)
    try:
        code = app(arguments, standalone_mode=False, obj=words)  # because: what typer refuses is said in our words
    except BrokenPipeError:
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except (LmtrainError, OSError, Refused) as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.exit(2)  # because: the help is on the screen by now
        if debug and not isinstance(error, Refused):
            raise
        said = of_system(error) if isinstance(error, OSError) else error
        said = said if isinstance(said, LmtrainError) else explained(said, arguments)
        print_error(said)
        sys.exit(said.exit_code)
    if isinstance(code, int):
        sys.exit(code)


if __name__ == "__main__":
    main()
