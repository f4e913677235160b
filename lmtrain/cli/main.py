"""The command `lmtrain`: its own options, errors and exit codes.

Verbs live in files beside this one, are listed in subcommands.py, and import what they need when they run, so that
`lmtrain --help` is quick.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from lmtrain import __version__
from lmtrain.cli.screen.print_messages_and_json import echo, print_error
from lmtrain.cli.subcommands import ClickError, VerbGroup
from lmtrain.errors import AlreadyReported, LmtrainError, MissingInputError, UsageError
from lmtrain.runtime.files.explain_os_errors import error_from_os

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
    except AlreadyReported as end:
        sys.exit(end.exit_code)
    except (LmtrainError, OSError, ClickError) as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.exit(2)  # because: typer has printed the help
        if debug and not isinstance(error, ClickError):
            raise
        reported = error_from_os(error) if isinstance(error, OSError) else error
        from lmtrain.cli.find_accepted_line import lead_on, settings_problems
        from lmtrain.cli.settings_keys.explain_click_errors import error_of_stray_word, usage_error_from_click

        if not isinstance(reported, LmtrainError):
            reported = usage_error_from_click(reported, arguments, settings_problems)
        elif isinstance(reported, (UsageError, MissingInputError)):
            reported = error_of_stray_word(arguments, settings_problems) or reported
        print_error(*lead_on(reported, arguments))
        sys.exit(reported.exit_code)
    if isinstance(code, int):
        sys.exit(code)


if __name__ == "__main__":
    main()
