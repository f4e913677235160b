"""The command `lmtrain`: its own options, errors and exit codes.

Verbs live in files beside this one, are listed in verbs.py, and import what they need when they run, so that
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
from lmtrain.cli.screen.messages import print_error
from lmtrain.cli.screen.terminal import echo
from lmtrain.cli.usage import Refused, explained, of_system
from lmtrain.cli.verbs import VerbGroup
from lmtrain.errors import LmtrainError

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
    """The console script. A user's error is one message on stderr; `--debug` anywhere shows where it came from."""
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
        said = error if isinstance(error, LmtrainError) else _as_ours(error, arguments)
        print_error(said)
        sys.exit(said.exit_code)
    if isinstance(code, int):
        sys.exit(code)


def _as_ours(error: Exception, arguments: list[str]) -> LmtrainError:
    return of_system(error) if isinstance(error, OSError) else explained(error, arguments)


if __name__ == "__main__":
    main()
