"""Several processes of one command on this machine, as `--nproc` asks for. Called by pretrain and eval; torch-free."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.cli.say import tell

if TYPE_CHECKING:
    from lmtrain.runtime.launch import Outcome
    from lmtrain.runtime.process import ProcessEnv

NumProcesses = Annotated[
    int | None, typer.Option("--nproc", min=1, help="Start this many processes here; they share the work.")
]


def this_process(nproc: int | None) -> ProcessEnv:
    """Who this process is, or the first of those that it is about to start. Call it before torch is imported."""
    from lmtrain.runtime.launch import follow_launcher
    from lmtrain.runtime.process import ProcessEnv, share_cores

    env = ProcessEnv.detect()
    share_cores()
    if env.launcher == "lmtrain":
        follow_launcher()
    return env if nproc is None else env.as_launcher(nproc)


def run_processes(arguments: Sequence[str], nproc: int, failed: Callable[[Outcome], None] | None = None) -> None:
    """`lmtrain ARGUMENTS` in several processes; what it refuses has been said once by now.

    `failed` is told where a process has ended the others.
    """
    from lmtrain.runtime.launch import launch

    outcome = launch([sys.executable, "-m", "lmtrain", *arguments], nproc)
    if outcome.cause is not None:
        tell(f"error: {outcome.cause}")
        if failed is not None:
            failed(outcome)
    if outcome.exit_code != 0:
        raise typer.Exit(outcome.exit_code)


def without_nproc(words: Sequence[str]) -> list[str]:
    """A command line as each of the processes is to have it."""
    found, stream = [], iter(words)
    for word in stream:
        if word == "--nproc":
            next(stream, None)
        elif not word.startswith("--nproc="):
            found.append(word)
    return found
