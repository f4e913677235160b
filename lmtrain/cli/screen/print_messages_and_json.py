"""Printing for all verbs: lines, messages, errors, JSON and progress. Control characters in texts are escaped.

On a terminal messages are wrapped between words; elsewhere a line stays whole, to be searched and copied. Facts and
tables go through print_facts_and_tables.py. This module must stay quick to import.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

import typer

from lmtrain.errors import LmtrainError, StoppedEarly
from lmtrain.runtime.processes.command_watch import note_output
from lmtrain.runtime.terminal_safe_text import escape_control_characters, wrap_text

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from lmtrain.observe.screen.command_progress import ProgressReporter
    from lmtrain.runtime.processes.process_environment import ProcessEnv

_TITLE = "error: "


def echo(text: object = "", *, err: bool = False, nl: bool = True, **style: Any) -> None:
    """Print a line on stdout, or on stderr with `err`; `style` is typer's, such as `bold=True`."""
    note_output()
    escaped_text = escape_control_characters(str(text))
    typer.echo(typer.style(escaped_text, **style) if style else escaped_text, err=err, nl=nl)


def say_already_there(output: Path, *, as_json: bool = False) -> None:
    """Print that a command has nothing to do, since its output is there."""
    if as_json:
        print_json({"output": str(output), "is_already_there": True})
    else:
        echo(f"{output} is already there, made from the same inputs with the same options.")


def print_json(facts: object, *, indent: int | None = 1, **json_options: Any) -> None:
    """Print `facts` as JSON for --json; `json_options` go to json.dumps, such as `ensure_ascii=False`."""
    echo(json.dumps(facts, indent=indent, **json_options))


def print_text(text: str) -> None:
    """Print a model's or a config's text: to a terminal with control characters escaped, elsewhere unchanged."""
    note_output()
    typer.echo(escape_control_characters(text) if sys.stdout.isatty() else text, nl=False)


def progress(task: str, unit: str = "", interrupted: str = "") -> AbstractContextManager[ProgressReporter]:
    """Context manager that shows a progress line for `task` on stderr. It yields a function to call with the amount
    done and, optionally, the total, both counted in `unit`. If the user presses Ctrl-C, `interrupted` is printed, a
    sentence on what is left behind.
    """
    from lmtrain.cli.screen.print_facts_and_tables import PlainConsole
    from lmtrain.observe.screen import command_progress

    return command_progress.progress(PlainConsole(stderr=True), task, unit, stop_note=interrupted)


def print_message(console: Console, message: str) -> None:
    """Print a message on this rich console: wrapped between words on a terminal, otherwise as one line. Control
    characters in it are escaped.
    """
    from rich.text import Text

    from lmtrain.observe.screen.print_one_line import print_line

    message = escape_control_characters(message)
    if not console.file.isatty():
        print_line(console, message)
        return
    text = Text(wrap_text(message, console.width))
    if message.startswith(_TITLE):
        text.stylize("bold red", 0, len(_TITLE))
    console.print(text, soft_wrap=True, highlight=False)


def print_notice(message: str) -> None:
    """Print a message on stderr, since stdout is for a command's result. If a progress line is shown, the message
    appears above it.
    """
    from lmtrain.cli.screen.print_facts_and_tables import PlainConsole

    note_output()
    if hasattr(sys.stderr, "rich_proxied_file"):  # because: a second console would overwrite the progress line
        print(escape_control_characters(message), file=sys.stderr)
    else:
        print_message(PlainConsole(stderr=True), message)


def print_wait(text: str) -> None:
    """Print on a terminal what is done in the seconds in which nothing else is printed."""
    if sys.stderr.isatty():
        echo(text, err=True, dim=True)


def print_error(error: LmtrainError, advice: str = "") -> None:
    """Print an error, its notes and the lines `advice` on stderr. The message begins with the name of this rank unless
    it is rank 0, and with the node's name in a launcher. Print nothing if the error came from another rank and rank 0
    reports it for all.
    """
    from lmtrain.runtime.processes.process_environment import ProcessEnv

    env: ProcessEnv | None = None
    with suppress(LmtrainError):  # because: an error in this process's environment is reported elsewhere
        env = ProcessEnv.detect()
    if error.is_from_peer and env is not None and env.is_child and env.rank > 0:
        return  # because: of the ranks that one launcher shows, rank 0 reports for all
    title = "" if isinstance(error, StoppedEarly) else _TITLE  # because: a stop on request is no error
    text = "\n".join([str(error), *getattr(error, "__notes__", ())]) + advice
    print_notice(f"{title}{_process_prefix(str(error), env)}{text}")


def _process_prefix(message: str, env: ProcessEnv | None) -> str:
    """Return the prefix "NAME: " for an error message, which names the rank of this process, or the node if it is a
    launcher. Return "" for rank 0, without `env`, and if `message` begins with that name already.
    """
    if env is None or env.rank == 0:
        return ""
    # because: errors of the command line are reported before it is parsed
    starts_ranks = any(word.partition("=")[0] == "--nproc-per-node" for word in sys.argv)
    prefix = f"node {env.host}" if starts_ranks else env.label
    return "" if message.startswith(prefix) else f"{prefix}: "
