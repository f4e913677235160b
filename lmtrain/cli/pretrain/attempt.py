"""One attempt of a run: what this process owes to others wherever it ends, to its peers, in stop.json and in the count.

Entered by pretrain around all that it does, on every process of a run and in the launcher. A process owes more the
further it comes: `settle`, `begin`, `met` and `conclude` say how far that is, and the end of the block pays it back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from lmtrain.cli.pretrain.summary import left_behind
from lmtrain.cli.ranks.launching import tell_peers
from lmtrain.cli.screen.terminal import echo, print_error, warn_of
from lmtrain.errors import LayoutError, LmtrainError, RanksDifferError, StoppedEarly, StoppedForGood
from lmtrain.runfolder.ends import (
    is_stop_written_since,
    request_file_cause,
    stop_stamp,
    write_failure,
    write_stop,
    write_unsaved_stop,
)
from lmtrain.runfolder.names import STOP_FILE
from lmtrain.runfolder.stop import DONE
from lmtrain.runtime.processes.faults import arm_from_env, fault_point
from lmtrain.runtime.processes.process import BEGAN, ProcessEnv, end_now, set_env_default
from lmtrain.runtime.processes.signals import Stopped, StopRequest, ignore_stops, listening
from lmtrain.train.config import RunConfig

if TYPE_CHECKING:
    import torch

    from lmtrain.train.before.preflight import Inputs
    from lmtrain.train.loop import Summary

_WORD_S = 1.0  # because: what a peer tells before it leaves may be read after its connections closed


@contextmanager
def attempt(env: ProcessEnv) -> Iterator[Attempt]:
    """Do within what a run takes; raise how it ends where that is not with its last step.

    A process that is refused before it has met its peers tells them. Asked to stop when it has nothing of its own to
    save, it ends with 75. What fails once the run has begun stands in stop.json.
    """
    arm_from_env()
    with listening() as stop:
        this = Attempt(env, stop)
        try:
            with this.refusals_told(), this.owed:
                yield this
        except Stopped as stopped:
            this.leave(stopped)
    if this.stopped is not None:
        raise this.stopped


class Attempt:
    """One process of a run, or the launcher of some, on its way to the last step."""

    def __init__(self, env: ProcessEnv, stop: StopRequest) -> None:
        self.env, self.stop = env, stop
        self.owed = ExitStack()  # what becomes of a start that ends within it
        self.stopped: StoppedEarly | None = None  # how a run ends that has saved what it has done
        self._config: RunConfig | None = None

    @property
    def config(self) -> RunConfig:
        """The settings, once they are settled."""
        assert self._config is not None
        return self._config

    def settle(self, config: RunConfig) -> None:
        """Take these settings: from here on a stop ends the start, and stop.json says so."""
        folder = Path(config.run.dir)
        self._config, self._before = config, stop_stamp(folder)
        self.stop.at_once()
        if self.env.rank == 0 and not self.env.is_child and sys.stderr.isatty():
            # because: what follows takes seconds, and a person would look at nothing
            echo(f"{config.run.dir}: looking at data and machine, then loading torch", err=True, dim=True)
        path = folder / STOP_FILE
        if self.env.rank == 0 and os.path.lexists(path):
            path.unlink()
            raise StoppedForGood(
                f"{path} asks this run to stop and was there before it began. It is removed; start the same command "
                "again to go on."
            )

    def begin(self, inputs: Inputs, *, in_ranks: bool = False) -> None:
        """Count this start, or refuse it where earlier ones were lost at the same step.

        A launcher only refuses: what is done `in_ranks` they count themselves.
        """
        from lmtrain.train.in_loop.starts import Starts, begin, counted

        if not in_ranks:
            fault_point("start.imports")
            self.owed.enter_context(counted(begin(self.config, inputs, self.env)))
            self.owed.enter_context(self._reasons_kept())
            return
        if self.env.rank == 0:
            Starts.at(self.config, inputs, inputs.resume_from).refuse(self.config)
        set_env_default(BEGAN, repr(self.stop.began_s))

    @contextmanager
    def met(self) -> Iterator[tuple[torch.device, Sequence[str]]]:
        """Hold this process's device and its peers; give the device, and on rank 0 the host of each process."""
        from lmtrain.observe.measure import phases
        from lmtrain.observe.watch.guard import watched
        from lmtrain.runtime.machine.device import memory_errors, pick_device
        from lmtrain.runtime.processes.process_group import start

        def say(error: LmtrainError) -> None:
            write_failure(Path(self.config.run.dir), error, self.env)
            print_error(error)

        config, env, folder = self.config, self.env, Path(self.config.run.dir)
        timeout_s, smaller = config.parallel.timeout_s, max(1, config.train.micro_batch // 2)
        with memory_errors(f"Use train.micro_batch={smaller}, precision=bf16 or a smaller model.seq_len."):
            device = pick_device(config.compute.device, env)
            self.stop.hold()
            phases.enter("rendezvous")
            with (
                start(env, device, timeout_s) as peers,
                watched(
                    env, peers, folder, timeout_s, self.stop.hear, ending=say, on_device=device.type == "cuda"
                ) as watch,
                self._heard_by_peers(watch.tell_stop),
            ):
                yield device, peers.hosts

    def conclude(self, summary: Summary) -> None:
        """Write how a run ends that has saved what it has done, and which of its starts count no more."""
        self.owed.close()
        ignore_stops()  # because: srun --kill-on-bad-exit ends tasks that leave a moment after the first with code 75
        config, cause = self.config, summary.stopped_by
        for_good = cause == request_file_cause(STOP_FILE)
        if cause:
            kind = StoppedForGood if for_good else StoppedEarly
            self.stopped = kind(f"{cause} at step {summary.step} of {config.total_steps}: {left_behind(config)}")
        code = self.stopped.exit_code if self.stopped else 0
        if self.env.rank > 0:
            raise typer.Exit(code)  # because: rank 0 speaks for all
        warn_of(write_stop(Path(config.run.dir), cause or DONE, code, step=summary.step))
        if for_good:
            (Path(config.run.dir) / STOP_FILE).unlink(missing_ok=True)

    @contextmanager
    def refusals_told(self) -> Iterator[None]:
        """Tell those that would wait for this process why it does not come; the refusal stands whatever comes of that.

        The launcher of a node speaks for all its ranks.
        """
        try:
            yield
        except LmtrainError as error:
            if self.stop.meets or not self.env.has_peers:
                raise
            print_error(error)
            tell_peers(self.env, error, found_by_all=self._config is None or isinstance(error, LayoutError))
            if "--debug" in sys.argv:
                raise
            raise typer.Exit(error.exit_code) from None

    @contextmanager
    def _reasons_kept(self) -> Iterator[None]:
        """Write what fails within into stop.json: the run may have its folder by now."""
        try:
            yield
        except RanksDifferError as error:
            if self.env.rank > 0:
                raise typer.Exit(error.exit_code) from None  # because: rank 0 speaks for all
            raise
        except LmtrainError as error:
            if self.env.has_peers and not self.stop.meets:
                raise  # because: the peers are told, and write down that none of them begins
            if isinstance(error, StoppedEarly):  # what a peer was asked before they met
                self._write_cut_off(str(error))
            else:
                write_failure(Path(self.config.run.dir), error, self.env)
            raise

    @contextmanager
    def _heard_by_peers(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Tell the peers, by `tell`, which waits for nobody, where a stop makes this process leave before they do.

        And a peer that went because it was asked to stop is not lost: this process stops as well.
        """
        from lmtrain.runtime.processes.process_group import is_peer_error

        with self.stop.told_by(tell):
            try:
                yield
            except Exception as error:
                if is_peer_error(error) and self.stop.was_told(_WORD_S):
                    raise Stopped(self.stop.requested) from error
                raise

    def leave(self, stopped: Stopped) -> None:
        """End this process, which was asked to stop before the first step or for the second time."""
        env, cause, left = self.env, self.stop.cause, "the settings were not read yet. Run the same command again."
        if env.has_peers and not self.stop.meets:
            with suppress(Stopped):  # because: for the second time nobody is told
                tell_peers(env, StoppedEarly(str(stopped)))
        ignore_stops()
        if self._config is not None:
            left = left_behind(self.config)
            self._write_cut_off(cause)
        error = StoppedEarly(f"{cause}: {left}")
        if env.world_size == 1:
            raise error from None
        if env.rank == 0:
            print_error(error)
        end_now(error.exit_code)  # because: groups whose members have left can stop a process from ending in peace

    def _write_cut_off(self, cause: str) -> None:
        """Write that the run was asked to stop before it had anything to save."""
        # because: srun asks all to stop where one of them fails, and whoever started that one has written why
        is_said = self.env.world_size > 1 and is_stop_written_since(Path(self.config.run.dir), self._before)
        if self.env.rank == 0 and not is_said:
            warn_of(write_unsaved_stop(Path(self.config.run.dir), cause))
