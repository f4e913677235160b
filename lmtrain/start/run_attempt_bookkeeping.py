"""The duties of a process that starts a run, whatever ends it: inform peers, write stop.json, count the start.

`run_attempt` surrounds everything that pretrain does, on every rank and in the launcher. The duties grow with progress:
`accept_settings`, `count_start`, `join_peers` and `record_result` mark the progress, and the end of the block fulfils
the duties of the stage that was reached.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lmtrain.checkpoint.find_and_prune import latest_checkpoint
from lmtrain.data.data_settings import DataSettings
from lmtrain.errors import (
    AlreadyReported,
    LayoutError,
    LmtrainError,
    PeerLostError,
    RanksDifferError,
    StoppedEarly,
    StoppedForGood,
    way,
)
from lmtrain.runfolder.file_names import CHECKPOINTS, METRICS, START_FILES, START_FOLDERS, STOP_FILE, TEXT_RECORD
from lmtrain.runfolder.read_and_record_run_end import (
    is_stop_written_since,
    request_file_cause,
    stop_stamp,
    write_failure,
    write_stop,
    write_unsaved_stop,
)
from lmtrain.runfolder.stop_json_writer import DONE
from lmtrain.runtime.files.put_back_if_refused import put_back_if_refused
from lmtrain.runtime.processes.fault_injection import arm_from_env, fault_point
from lmtrain.runtime.processes.process_environment import (
    COMMAND_VARIABLE,
    START_TIME_VARIABLE,
    ProcessEnv,
    end_now,
    process_identity,
    set_env_default,
)
from lmtrain.runtime.processes.stop_signals import Stopped, StopRequest, ignore_stops, stop_requests
from lmtrain.runtime.terminal_safe_text import warn
from lmtrain.start.launch_ranks import report_refusal
from lmtrain.train.run_config import RunConfig

if TYPE_CHECKING:
    import torch

    from lmtrain.parallel.mesh import Mesh
    from lmtrain.train.loop import Summary
    from lmtrain.train.startup_checks.preflight import Inputs

# because: the message of a peer that leaves may arrive after its connections have closed
_STOP_MESSAGE_WAIT_S = 1.0


@contextmanager
def run_attempt(
    env: ProcessEnv, report_error: Callable[[LmtrainError], None], report_wait: Callable[[str], None], *,
    raises_reported: bool = False,
) -> Iterator[Attempt]:  # fmt: skip
    """Context manager around one start of a run in this process: yield the Attempt, whose methods record how far it
    came. At the end raise StoppedEarly if the run was stopped and has saved.

    `report_error` prints an error, `report_wait` what is done while nothing else is printed. After a printed error
    AlreadyReported is raised, or with `raises_reported` the error itself.

    If this process fails before it has joined its peers, it sends them the error. If it is asked to stop while it has
    nothing to save, it exits with code 75. A failure after the run has begun is written to stop.json.
    """
    arm_from_env()
    with stop_requests() as stop_request:
        attempt = Attempt(env, stop_request, report_error, report_wait)
        try:
            with (
                attempt.changes, attempt.made_text, attempt.report_refusals(raises=raises_reported), attempt.cleanup,
            ):  # fmt: skip
                yield attempt
        except Stopped as stopped:
            attempt.end_stopped(stopped)
    if attempt.stop_error is not None:
        raise attempt.stop_error


class Attempt:
    """A start of a run in this process, a rank or a launcher: the progress made, and what must happen when it ends."""

    def __init__(
        self, env: ProcessEnv, stop: StopRequest, report_error: Callable[[LmtrainError], None],
        report_wait: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.env, self.stop, self._report_error, self._report_wait = env, stop, report_error, report_wait
        self.cleanup = ExitStack()  # closed when this start ends: counts it, records its failure
        self.changes = ExitStack()  # closed last: if this start was refused, undoes what it has written
        self.made_text = ExitStack()  # the same for the dataset of data.text, until the checks of its data are passed
        self.stop_error: StoppedEarly | None = None  # raised at the end of a run that stopped and saved
        self.has_settings = False  # True from `accept_settings` on
        self.config: RunConfig  # from then on, and set again once the layout is chosen

    def accept_settings(self, config: RunConfig) -> None:
        """Store the run's settings in `config`. From now until `join_peers`, a stop request (a signal) ends this
        process at once instead of after a training step, and is recorded in stop.json.

        Raise StoppedForGood if the run folder already holds the request file STOP, which is removed.
        """
        folder = Path(config.run.dir)
        self.config, self.has_settings, self._stamp_before = config, True, stop_stamp(folder)
        self.stop.raise_at_once()
        if self.env.rank == 0:
            self.changes.enter_context(put_back_if_refused(folder, START_FILES, START_FOLDERS, METRICS))
        if self.env.rank == 0 and not self.env.is_child:
            self._report_wait(f"{config.run.dir}: looking at data and machine, then loading torch")
        path = folder / STOP_FILE
        if self.env.rank == 0 and os.path.lexists(path):
            path.unlink()
            raise StoppedForGood(
                f"The file {path}, which asks a run to stop, existed before this start. It has been removed; run the "
                "same command again to go on."
            )

    def count_start(self, inputs: Inputs, *, starts_ranks: bool = False) -> None:
        """Count this start of the run in its starts.json; the entry is removed again unless the start crashes. Raise
        NoProgressError if too many earlier starts from the same checkpoint crashed.

        With `starts_ranks`, this process is a launcher: it only raises, and its ranks count the start themselves.
        """
        from lmtrain.train.in_loop.failed_start_counter import LostStarts, count_start, counting_start

        self.made_text.close()
        if not starts_ranks:
            fault_point("start.imports")
            self.cleanup.enter_context(counting_start(count_start(self.config, inputs, self.env)))
            self.cleanup.enter_context(self._record_failures())
            return
        if self.env.rank == 0:
            LostStarts.for_run(self.config, inputs, inputs.resume_from).check_limit(self.config)
        set_env_default(START_TIME_VARIABLE, repr(self.stop.began_s))
        set_env_default(COMMAND_VARIABLE, str(process_identity(os.getpid())))

    @contextmanager
    def join_peers(self, inputs: Inputs) -> Iterator[tuple[Mesh, torch.device, Sequence[str]]]:
        """Context manager that opens the device, the process group of all ranks and the hang watchdog, and checks that
        the ranks agree on their settings and `inputs`; every rank must enter it. Yield (process groups of the layout,
        device, host names of all ranks in order of rank); the host names are given on rank 0 only.
        """
        from lmtrain.observe.hang_watch.start_companion_and_raise_verdict import watch_run
        from lmtrain.parallel.mesh import build_mesh
        from lmtrain.runtime.machine.choose_device import memory_errors, pick_device
        from lmtrain.runtime.processes import current_phase
        from lmtrain.runtime.processes.process_group import open_process_group
        from lmtrain.train.ranks.compare_ranks_at_start import check_ranks_agree

        def report(error: LmtrainError) -> None:
            write_failure(Path(self.config.run.dir), error, self.env)
            self._report_error(error)

        config, env, folder = self.config, self.env, Path(self.config.run.dir)
        timeout_s = config.parallel.timeout_s
        with memory_errors(_way_to_less_memory(config)):
            device = pick_device(config.compute.device, env)
            self.stop.defer()
            current_phase.enter("rendezvous")
            with (
                open_process_group(env, device, timeout_s) as peers,
                watch_run(
                    env, peers, folder, timeout_s, self.stop.stop_with_peer, on_end=report,
                    on_device=device.type == "cuda",
                ) as watch,
                self._report_stop_to_peers(watch.send_stop),
            ):
                check_ranks_agree(config, inputs, peers.hosts)
                yield build_mesh(config.parallel.layout, device, timeout_s), device, peers.hosts

    def record_result(self, summary: Summary) -> None:
        """Write to stop.json that the run finished, or that it was stopped and has saved. Remove the counted starts
        from starts.json, since this one has succeeded.

        Ranks other than 0 exit here. After a stop, `stop_error` holds the exception to raise at the end.
        """
        self.cleanup.close()
        ignore_stops()  # because: srun --kill-on-bad-exit ends tasks that leave a moment after the first with code 75
        config, cause = self.config, summary.stopped_by
        for_good = cause == request_file_cause(STOP_FILE)
        if cause:
            kind = StoppedForGood if for_good else StoppedEarly
            self.stop_error = kind(f"{cause} at step {summary.step} of {config.total_steps}: {_saved_state(config)}")
        code = self.stop_error.exit_code if self.stop_error else 0
        if self.env.rank > 0:
            raise AlreadyReported(code)  # because: rank 0 reports for all
        warn(write_stop(Path(config.run.dir), cause or DONE, code, step=summary.step))
        if for_good:
            (Path(config.run.dir) / STOP_FILE).unlink(missing_ok=True)

    @contextmanager
    def report_refusals(self, *, raises: bool) -> Iterator[None]:
        """Context manager: if its body raises an LmtrainError before this process has joined the process group, send
        the error to the other ranks, so that they do not wait for it.

        Then raise AlreadyReported, or with `raises` the error, also if it cannot be sent. The launcher of a node
        reports for all its ranks.
        """
        try:
            yield
        except LmtrainError as error:
            if self.stop.rendezvous_started or not self.env.has_peers or error.is_from_peer:
                raise
            self._report_error(error)
            # because: all ranks find a wrong layout, and that rank 0 is lost
            is_found_by_all = not self.has_settings or isinstance(error, LayoutError | PeerLostError)
            report_refusal(self.env, error, peers_fail_too=is_found_by_all)
            if raises:
                raise
            raise AlreadyReported(error.exit_code) from None

    @contextmanager
    def _record_failures(self) -> Iterator[None]:
        """Context manager: if its body raises an LmtrainError, write it to stop.json. Among several processes, an error
        before they have joined is left to `report_refusals`. All errors are raised again.
        """
        try:
            yield
        except RanksDifferError as error:
            if self.env.rank > 0:
                raise AlreadyReported(error.exit_code) from None  # because: rank 0 reports for all
            raise
        except LmtrainError as error:
            if self.env.has_peers and not self.stop.rendezvous_started:
                raise  # because: `report_refusals` sends it to the peers, which record that no rank begins
            if isinstance(error, StoppedEarly):  # a peer received a stop request before all had joined
                self._write_unsaved_stop(str(error))
            else:
                write_failure(Path(self.config.run.dir), error, self.env)
            raise

    @contextmanager
    def _report_stop_to_peers(self, send_stop: Callable[[str], None]) -> Iterator[None]:
        """Context manager: if a stop request (a signal) makes this process exit at once, before the others do, call
        `send_stop` with the cause, which tells them.

        `send_stop` must not block. If a collective fails because a peer left after a stop request, raise Stopped
        instead of treating that peer as lost.
        """
        from lmtrain.runtime.processes.process_group import is_peer_error

        with self.stop.report_stop(send_stop):
            try:
                yield
            except Exception as error:
                if is_peer_error(error) and self.stop.wait_for_stop(_STOP_MESSAGE_WAIT_S):
                    raise Stopped(self.stop.requested) from error
                raise

    def end_stopped(self, stopped: Stopped) -> None:
        """End this process with exit code 75 after a stop request before the first step, or a second request. Write the
        cause to stop.json, if the run's folder is known already, and send it to the ranks that wait for this one. Never
        return: a single process raises StoppedEarly.
        """
        env, cause = self.env, self.stop.cause
        what_is_saved = "the settings were not read yet. Run the same command again."
        if env.has_peers and not self.stop.rendezvous_started:
            with suppress(Stopped):  # because: a second request ends the process without further messages
                report_refusal(env, StoppedEarly(str(stopped)))
        ignore_stops()
        if self.has_settings:
            what_is_saved = _saved_state(self.config)
            self._write_unsaved_stop(cause)
        error = StoppedEarly(f"{cause}: {what_is_saved}")
        if env.world_size == 1:
            raise error from None
        if env.rank == 0:
            self._report_error(error)
        end_now(error.exit_code)  # because: a process group whose members have left can block a normal exit

    def _write_unsaved_stop(self, cause: str) -> None:
        """Write to stop.json, on rank 0 only, that `cause` stopped this start before it had saved a checkpoint. Do
        nothing if another process has written stop.json in the meantime.
        """
        # because: srun stops all tasks when one of them fails, and the launcher of that one has written the cause
        is_written = self.env.world_size > 1 and is_stop_written_since(Path(self.config.run.dir), self._stamp_before)
        if self.env.rank == 0 and not is_written:
            warn(write_unsaved_stop(Path(self.config.run.dir), cause))


def _way_to_less_memory(config: RunConfig) -> str:
    """Return a sentence that says which settings would need less memory. A smaller micro-batch divides the batch too.
    """
    micro = config.train.micro_batch
    smaller = next((micro // n for n in range(2, micro + 1) if micro % n == 0), None)
    words = [way(f"train.micro_batch={smaller}")] if smaller else []
    words += [way("recompute=full")] if config.recompute.kind != "full" else []
    words += [way("precision=bf16")] if config.precision.kind == "fp32" else []
    return f"Use {', '.join(words)}{' or ' if words else ''}a smaller model.seq_len."


def _saved_state(config: RunConfig) -> str:
    """Return a sentence for the message of a stopped run: the path of its newest checkpoint, or that nothing is saved
    but what was made of data.text, and how to continue.
    """
    newest = latest_checkpoint(Path(config.run.dir) / CHECKPOINTS)
    data = config.data
    if newest is None and isinstance(data, DataSettings) and data.text is not None:
        record = Path(data.path).with_name(TEXT_RECORD)
        if record.is_file():
            return f"no step is saved, and {record.parent} keeps what was made of data.text. The same command goes on."
    if newest is None:
        return "nothing is saved. The same command begins anew; checkpoint.interval_steps says when a run saves."
    return f"a checkpoint is saved, {newest}. Run the same command again to go on."
