"""How a run ends that does not reach its last step: with its reason in stop.json, and the exit code that belongs to it.

Called by pretrain, on every process of a run and in the launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lmtrain.cli.pretrain.summary import left_behind
from lmtrain.cli.ranks.launching import tell_peers
from lmtrain.cli.screen.messages import print_error, warn_of
from lmtrain.errors import LmtrainError, RanksDifferError, StoppedEarly, StoppedForGood
from lmtrain.runtime.processes.process import end_now
from lmtrain.runtime.processes.signals import Stopped, StopRequest, ignore_stops, listening

if TYPE_CHECKING:
    from lmtrain.observe.watch.guard import Watch
    from lmtrain.runtime.processes.process import ProcessEnv
    from lmtrain.runtime.processes.process_group import Peers
    from lmtrain.train.config import RunConfig
    from lmtrain.train.loop import Summary

_WORD_S = 1.0  # because: what a peer tells before it leaves may be read after its connections closed


@contextmanager
def stoppable(config: RunConfig, env: ProcessEnv, waited_for: ProcessEnv | None) -> Iterator[StopRequest]:
    """Whatever asks for a stop within, before the first step or for the second time, ends this process with 75.

    `waited_for` is this process, where it may have peers that would wait for it.
    """
    from lmtrain.runfolder.ends import identity, is_written_since, write_cut_off

    folder = Path(config.run.dir)
    before = identity(folder)
    with listening() as stop:
        try:
            stop.at_once()
            yield stop
            return
        except Stopped as stopped:
            if waited_for is not None and waited_for.has_peers and not stop.meets:
                with suppress(Stopped):  # because: for the second time nobody is told
                    tell_peers(waited_for, StoppedEarly(str(stopped)))
        ignore_stops()
        error = StoppedEarly(f"{stop.cause}: {left_behind(config)}")
        # because: srun asks all to stop where one of them fails, and whoever started that one has written why
        if env.rank == 0 and not (env.world_size > 1 and is_written_since(folder, before)):
            warn_of(write_cut_off(folder, stop.cause))
        if env.world_size == 1:
            raise error
        if env.rank == 0:
            print_error(error)
        end_now(error.exit_code)  # because: groups whose members have left can stop a process from ending in peace


@contextmanager
def reasons_kept(config: RunConfig, env: ProcessEnv) -> Iterator[None]:
    """What fails within says so in stop.json: from the moment on at which the run may have its folder."""
    from lmtrain.runfolder.ends import identity, is_written_since, write_cut_off, write_failure

    folder = Path(config.run.dir)
    before = identity(folder)
    try:
        yield
    except RanksDifferError as error:
        if env.rank > 0:
            raise typer.Exit(error.exit_code) from None  # because: rank 0 speaks for all
        raise
    except StoppedEarly as error:  # what a peer was asked before they met
        if env.rank == 0 and not is_written_since(folder, before):
            warn_of(write_cut_off(folder, str(error)))
        raise
    except LmtrainError as error:
        write_failure(folder, error, env)
        raise


@contextmanager
def heard_by_peers(stop: StopRequest, tell: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """From here on to the end of the run. Who leaves before its peers do says why, by `tell`, which waits for nobody.

    And a peer that went because it was asked to stop is not lost: this process stops as well.
    """
    from lmtrain.runtime.processes.process_group import is_peer_error

    with stop.told_by(tell):
        try:
            yield
        except Exception as error:
            if is_peer_error(error) and stop.was_told(_WORD_S):
                raise Stopped(stop.requested) from error
            raise


def conclude(config: RunConfig, summary: Summary, env: ProcessEnv) -> StoppedEarly | None:
    """Of a run that has saved what it has done: write why it ends, and give what is to be raised in the end."""
    from lmtrain.runfolder.ends import asked_by, write_stop
    from lmtrain.runfolder.names import STOP_FILE
    from lmtrain.runfolder.stop import DONE

    ignore_stops()  # because: srun --kill-on-bad-exit ends tasks that leave a moment after the first with code 75
    cause, error = summary.stopped_by, None
    for_good = cause == asked_by(STOP_FILE)
    if cause:
        kind = StoppedForGood if for_good else StoppedEarly
        error = kind(f"{cause} at step {summary.step} of {config.total_steps}: {left_behind(config)}")
    code = error.exit_code if error else 0
    if env.rank > 0:
        raise typer.Exit(code)  # because: rank 0 speaks for all
    warn_of(write_stop(Path(config.run.dir), cause or DONE, code, step=summary.step))
    if for_good:
        (Path(config.run.dir) / STOP_FILE).unlink(missing_ok=True)
    return error


def refuse_stop_file(config: RunConfig, env: ProcessEnv) -> None:
    """One that was there before the run: whoever put it there wants no more steps, and is told what became of that."""
    from lmtrain.runfolder.names import STOP_FILE

    path = Path(config.run.dir) / STOP_FILE
    if env.rank == 0 and os.path.lexists(path):
        path.unlink()
        raise StoppedForGood(
            f"{path} asks this run to stop and was there before it began. It is removed; start the same command "
            "again to go on."
        )


def watched_run(
    config: RunConfig, env: ProcessEnv, met: Peers, heard: Callable[[str], None] = lambda name: None,
    *, on_device: bool = False,
) -> AbstractContextManager[Watch]:
    """`heard` gets the name of a signal that another process was sent, from another thread."""
    from lmtrain.observe.watch.guard import watched
    from lmtrain.runfolder.ends import write_failure

    def ending(error: LmtrainError) -> None:
        write_failure(Path(config.run.dir), error, env)
        print_error(error)

    return watched(
        env, met, Path(config.run.dir), config.parallel.timeout_s, heard=heard, ending=ending, on_device=on_device
    )
