"""What verbs print: lines, sentences, JSON, and how far they are. Files' texts are shown; a terminal never obeys them.

A sentence on a terminal is broken between words; elsewhere a line stays one, to be searched and copied. Called by every
verb, of which it knows none; facts and tables go through console.py. Must stay quick to import.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

import typer

from lmtrain.errors import LmtrainError, StoppedEarly
from lmtrain.observe.safe_text import escaped, warn, wrapped

if TYPE_CHECKING:
    from rich.console import Console

    from lmtrain.observe.screen.verb_progress import Reporter
    from lmtrain.runtime.processes.process import ProcessEnv

_TITLE = "error: "


def echo(text: object = "", *, err: bool = False, nl: bool = True, **style: Any) -> None:
    """Print a line for people or scripts; `style` is typer's, such as `bold=True`."""
    shown = escaped(str(text))
    typer.echo(typer.style(shown, **style) if style else shown, err=err, nl=nl)


def print_json(facts: object, *, indent: int | None = 1, **how: Any) -> None:
    """Print what --json asks for; `how` is the json module's, such as `ensure_ascii=False`."""
    echo(json.dumps(facts, indent=indent, **how))


def pass_on(text: str) -> None:
    """Print a model's or a config's text: to a terminal with control characters escaped, elsewhere unchanged."""
    typer.echo(escaped(text) if sys.stdout.isatty() else text, nl=False)


def progress(doing: str, unit: str = "", *, stopped: str = "") -> AbstractContextManager[Reporter]:
    """Show on stderr how far the work inside is; `stopped` is said after Ctrl-C."""
    from lmtrain.cli.screen.console import Screen
    from lmtrain.observe.screen import verb_progress as shown

    return shown.progress(Screen(stderr=True), doing, unit, stopped=stopped)


def say(console: Console, message: str) -> None:
    """Words that are longer than a line, as paths can be, stay whole: the terminal breaks them, and copies them so."""
    from rich.text import Text

    from lmtrain.observe.screen.training_view import print_line

    message = escaped(message)
    if not console.file.isatty():
        print_line(console, message)
        return
    text = Text(wrapped(message, console.width))
    if message.startswith(_TITLE):
        text.stylize("bold red", 0, len(_TITLE))
    console.print(text, soft_wrap=True, highlight=False)


def tell(message: str) -> None:
    """Print on stderr, beside a verb's result; above a progress line, where one is drawn there."""
    from lmtrain.cli.screen.console import Screen

    if hasattr(sys.stderr, "rich_proxied_file"):  # because: a console of its own would write past the one that draws
        print(escaped(message), file=sys.stderr)
    else:
        say(Screen(stderr=True), message)


def warn_of(problem: str | None) -> None:
    if problem is not None:
        warn(problem)


def print_error(error: LmtrainError) -> None:
    from lmtrain.runtime.processes.process import ProcessEnv

    env: ProcessEnv | None = None
    with suppress(LmtrainError):  # because: what is wrong with this process is an error of its own
        env = ProcessEnv.detect()
    if error.is_from_peer and env is not None and env.is_child and env.rank > 0:
        return  # because: of the ranks that one launcher shows, rank 0 speaks for all
    title = "" if isinstance(error, StoppedEarly) else "error: "  # because: who asks for a stop sees no error in it
    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    tell(f"{title}{_who(str(error), env)}{said}")


def _who(message: str, env: ProcessEnv | None) -> str:
    """Return which of several processes speaks: rank 0 for all of them, another for itself, a launcher for its node."""
    if env is None or env.rank == 0:
        return ""
    # because: what is wrong with a command line is said before it is read
    starts_ranks = any(word.partition("=")[0] == "--nproc-per-node" for word in sys.argv)
    who = f"node {env.host}" if starts_ranks else env.who
    return "" if message.startswith(who) else f"{who}: "
