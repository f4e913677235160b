"""A run of several processes, where they are not yet one run: started together, and refused together.

Called by pretrain. Torch is imported only where a refused process has peers to meet.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from lmtrain.cli.say import print_error, tell, warn_of
from lmtrain.errors import LmtrainError, OutputError, PeerLostError

if TYPE_CHECKING:
    from lmtrain.runtime.process import ProcessEnv
    from lmtrain.train.config import RunConfig


def launch_all(config: RunConfig, arguments: list[str], nproc: int) -> None:
    """This command in several processes; what it refuses has been said once by now."""
    from lmtrain.runtime.launch import launch
    from lmtrain.train.stop_file import write_stop

    outcome = launch([sys.executable, "-m", "lmtrain", "pretrain", *arguments], nproc)
    if outcome.cause is not None:
        tell(f"error: {outcome.cause}")
        lost = outcome.exit_code == PeerLostError.exit_code
        if outcome.exit_code != OutputError.exit_code:  # because: then the folder may be another run's
            facts = {"cause": outcome.cause, "exit_code": outcome.exit_code, "requeue": lost, "rank": outcome.rank}
            warn_of(write_stop(config, facts))
    if outcome.exit_code != 0:
        raise typer.Exit(outcome.exit_code)


@contextmanager
def told_to_peers(env: ProcessEnv | None) -> Iterator[None]:
    """A process that is refused here says so, and to those too that would wait for it; `None` for one without any.

    Whatever may go wrong with telling them, the refusal stands.
    """
    try:
        yield
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
