"""A command of several processes, where they are not yet one: started together, and refused together.

Called by pretrain and eval. Torch is imported only where a refused process has peers to meet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from lmtrain.cli.say import print_error, tell
from lmtrain.errors import LmtrainError, StoppedEarly
from lmtrain.runtime.signals import Stopped

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


@contextmanager
def told_to_peers(env: ProcessEnv | None) -> Iterator[None]:
    """A process that is refused here says so, and to those too that would wait for it; `None` for one without any.

    Whatever may go wrong with telling them, the refusal stands.
    """
    try:
        yield
    except Stopped as stopped:
        if env is not None and env.world_size > 1:
            _tell(env, StoppedEarly(str(stopped)))
        raise
    except LmtrainError as error:
        if env is None or env.world_size == 1:
            raise
        print_error(error)
        _tell(env, error)
        if "--debug" in sys.argv:
            raise
        raise typer.Exit(error.exit_code) from None


def _tell(env: ProcessEnv, error: LmtrainError) -> None:
    from lmtrain.runtime.process import Rendezvous

    try:
        Rendezvous.detect(env)
    except LmtrainError:
        return  # because: torch takes seconds to import, and there is nowhere to meet
    from lmtrain.runtime.meeting import tell_refusal

    tell_refusal(env, error)
