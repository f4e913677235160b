"""The command `lmtrain`: its own options, errors and exit codes.

Verbs live in files beside this one, are listed in subcommands.py, and import what they need when they run, so that
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
from lmtrain.cli.screen.print_messages_and_json import echo, print_error
from lmtrain.cli.subcommands import VerbGroup
from lmtrain.errors import LmtrainError, MissingInputError, OutputError, StorageError, UsageError, spelling_hint
from lmtrain.runtime.files.explain_os_errors import limit_reached

# because: depending on its version, typer bundles click under a name of its own or imports the package
ClickError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
_OS_ERRORS: tuple[tuple[tuple[int, ...], type[LmtrainError], str], ...] = (
    (
        (errno.EAGAIN,), StorageError,
        "A process or a thread could not be started: {reason}. End other processes, or raise `ulimit -u`.",
    ),
    (
        (errno.ENAMETOOLONG, errno.EINVAL), UsageError,
        "{file:.100}... cannot be a file: {reason}. Give a shorter or another name.",
    ),
    (
        (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP), MissingInputError,
        "{file} cannot be opened: {reason}. Check the path; --debug shows the traceback.",
    ),
    (
        (errno.EROFS, errno.EEXIST, errno.ENOTEMPTY), OutputError,
        "{file} cannot be written: {reason}. Choose another output.",
    ),
)  # fmt: skip
_CLICK_RULES = {"valid integer": "is not a whole number", "valid number": "is not a number"}


def usage_error_from_click(error: Any, argv: Sequence[str]) -> LmtrainError:
    """Return a UsageError that says in lmtrain's style what an error of click (typer's parser) means and what to type
    instead. `argv` is the command line without the program's name.
    """
    context = getattr(error, "ctx", None)
    command = command_name(context) if context is not None else " ".join(["lmtrain", *argv[:1]])
    help_hint = f"`{command} --help` shows how it is called."
    message = error.format_message().strip()
    if option := getattr(error, "option_name", None) if hasattr(error, "possibilities") else None:
        takes_settings = any(param.name == "overrides" for param in error.ctx.command.params)
        if takes_settings:
            from lmtrain.cli.settings_keys.translate_foreign_flags import foreign_line_message

            if rule := foreign_line_message(command, error, argv):
                return UsageError(rule)
        way_out = _suggest_option(option, command, error, argv, takes_settings)
        return UsageError(f"{option} is not an option of {command}. {way_out}")
    if match := re.match(r"No such command ['\"](.*?)['\"]", message):
        verbs = getattr(getattr(context, "command", None), "commands", {})
        return UsageError(f"{command} {match[1]} is not a command. {spelling_hint(match[1], verbs)}")
    if match := re.search(r"['\"](\S*)['\"] is not one of (.+?)\.?$", message):
        from lmtrain.config.name_suggestions import closest_value

        suggestion = closest_value(match[1], re.findall(r"['\"](\S+?)['\"]", match[2]))
        return UsageError(f"{_with_full_stop(message)} {f'Did you mean {suggestion}?' if suggestion else help_hint}")
    if match := re.match(r"Invalid value for ['\"](--?[\w-]+).*?['\"]: (.*)", message):
        rule = next((rule for pattern, rule in _CLICK_RULES.items() if pattern in match[2]), f"is refused: {match[2]}")
        return UsageError(f"{_with_full_stop(f'{match[1]} {_option_value(match[1], argv)} {rule}')} {help_hint}")
    return UsageError(f"{_with_full_stop(message)} {help_hint}")


def error_from_os(error: OSError) -> LmtrainError:
    """Convert an OSError that reached the top of the program to an LmtrainError with an exit code and a message that
    says what to do.
    """
    file, reason = str(error.filename or "a file"), error.strerror or str(error)
    if reached := limit_reached(error, Path(file)):
        return StorageError(f"Reading or writing {file} failed: {reached}")
    for numbers, error_type, message in _OS_ERRORS:
        if error.errno in numbers:
            return error_type(message.format(file=file, reason=reason))
    return StorageError(f"Reading or writing {file} failed: {reason}. Check the disk; --debug shows the traceback.")


def command_name(context: Any) -> str:
    """Return the full name of a click context's command, such as "lmtrain data show"."""
    words: list[str] = []
    while context is not None and context.parent is not None:
        words.insert(0, str(context.info_name))
        context = context.parent
    return " ".join(["lmtrain", *words])


def _with_full_stop(message: str) -> str:
    message = " ".join(message.split())
    return message if message.endswith((".", "?")) else f"{message}."


def _suggest_option(option: str, command: str, error: Any, argv: Sequence[str], takes_settings: bool) -> str:
    """Return a sentence that tells the user what to type instead of the unknown option `option`: a similar option of
    the command, or, if `takes_settings`, the setting that another tool calls so, or else how to list the options.
    """
    own_options = list(error.possibilities or ())  # because: click's own choice of similar options is often far off
    similar = [own for own in own_options if own.startswith(option)]
    similar = similar or difflib.get_close_matches(option, own_options, cutoff=0.7)
    name = option.lstrip("-").lower().replace("-", "_")
    closest = difflib.get_close_matches(option, similar, n=1, cutoff=0.8)
    if takes_settings and not closest:
        from lmtrain.cli.settings_keys.translate_foreign_flags import PROCESS_COUNT_NAMES
        from lmtrain.config.name_suggestions import UNSUPPORTED_SETTINGS

        if name in PROCESS_COUNT_NAMES and any("--nproc" in param.opts for param in error.ctx.command.params):
            return "Did you mean --nproc?"
        if name in UNSUPPORTED_SETTINGS:
            return UNSUPPORTED_SETTINGS[name]
        if overrides := _suggest_settings(option, name, argv):
            return f"Settings are words without dashes: type {' or '.join(overrides)}."
    return f"Did you mean {' or '.join(closest or similar)}?" if similar else f"`{command} --help` lists its options."


def _option_value(option: str, argv: Sequence[str]) -> str:
    """Return the value that the user typed for an option, as "--x=1" or "--x 1" in the command line `argv`; "" if there
    is none.
    """
    for word, next_word in zip(argv, [*argv[1:], ""], strict=True):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option and not next_word.startswith("--") and "=" not in next_word:
            return next_word
    return ""


def _suggest_settings(option: str, name: str, argv: Sequence[str]) -> list[str]:
    """Return the overrides KEY=VALUE that a user may have meant by the unknown option `option`; [] if none is similar.
    `name` is the option in snake case without dashes; the value is taken from the command line `argv`.
    """
    from lmtrain.config.compose_run_settings import group_choices
    from lmtrain.config.name_suggestions import SettingNames
    from lmtrain.train.run_config import RunConfig

    value = _option_value(option, argv) or "true"
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


def _print_version(value: bool) -> None:
    if value:
        echo(f"lmtrain {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; works after a verb too.")
    ] = False,
) -> None:
    """Options that stand before the verb; `--debug` is taken out of the command line in `main`."""


def main(arguments: list[str] | None = None) -> None:
    """Run the `lmtrain` command with `arguments`, by default those of the process. Errors that a user can cause are
    printed as one message on stderr, with a traceback if `--debug` is among the arguments, and end the process by
    SystemExit.
    """
    code = 1  # for an exception that is not an error of the user
    exit_handler = _ExitHandler()
    if arguments is None:
        atexit.register(exit_handler)  # because: handlers run last to first, and this one has to be the last
    try:
        _main(arguments)
        exit_handler.code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else code
        exit_handler.code = 0 if end.code is None else code
        raise
    finally:
        # because: a process that has not imported torch has no peers
        if groups := sys.modules.get("lmtrain.runtime.processes.process_group"):
            groups.skip_group_teardown(code)


class _ExitHandler:
    """An atexit handler that ends a process that has imported torch at once, with the exit code it has anyway.

    because: otherwise Python frees every object of torch one by one, which takes a second of CPU time
    """

    code: int | None = None  # None for an exception that Python reports

    def __call__(self) -> None:
        if self.code is None or "torch" not in sys.modules:
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            return  # because: Python itself reports output that cannot be written, and exits with 120
        os._exit(self.code)


def _main(arguments: list[str] | None) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # because: a file name may not be encodable for the terminal
    argv = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in argv
    arguments = [word for word in argv if word != "--debug"]
    # because: a vocabulary is some hundred thousand long-lived objects; the garbage collector's repeated scans of them
    # took a tenth of the start time
    gc.set_threshold(100_000, 20, 20)
    try:
        code = app(arguments, standalone_mode=False, obj=argv)  # because: typer's errors get messages of our own
    except BrokenPipeError:
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except (LmtrainError, OSError, ClickError) as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.exit(2)  # because: typer has printed the help
        if debug and not isinstance(error, ClickError):
            raise
        reported = error_from_os(error) if isinstance(error, OSError) else error
        reported = reported if isinstance(reported, LmtrainError) else usage_error_from_click(reported, arguments)
        from lmtrain.cli.settings_keys.apply_advice import advice_lines

        print_error(reported, advice_lines(reported, arguments))
        sys.exit(reported.exit_code)
    if isinstance(code, int):
        sys.exit(code)


if __name__ == "__main__":
    main()
