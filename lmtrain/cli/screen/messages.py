"""A message on a terminal: lines end between words. Elsewhere a line stays one, to be searched and copied.

Called where a verb says something in sentences. Knows no verb.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from lmtrain.errors import LmtrainError, StoppedEarly
from lmtrain.observe.safe_text import escaped, warn, wrapped

if TYPE_CHECKING:
    from rich.console import Console

    from lmtrain.runtime.processes.process import ProcessEnv

_TITLE = "error: "


def say(console: Console, message: str) -> None:
    """Words that are longer than a line, as paths can be, stay whole: the terminal breaks them, and copies them so."""
    from rich.text import Text

    from lmtrain.observe.screen.display import print_line

    message = escaped(message)
    if not console.file.isatty():
        print_line(console, message)
        return
    text = Text(wrapped(message, console.width))
    if message.startswith(_TITLE):
        text.stylize("bold red", 0, len(_TITLE))
    console.print(text, soft_wrap=True, highlight=False)


def tell(message: str) -> None:
    """On stderr, beside a verb's result."""
    from lmtrain.cli.screen.console import Screen

    say(Screen(stderr=True), message)


def warn_of(problem: str | None) -> None:
    if problem is not None:
        warn(problem)


def print_error(error: LmtrainError) -> None:
    env = _this_process()
    if error.is_passed_on and env is not None and env.is_child and env.rank > 0:
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


def _this_process() -> ProcessEnv | None:
    from lmtrain.runtime.processes.process import ProcessEnv

    try:
        return ProcessEnv.detect()
    except LmtrainError:
        return None
