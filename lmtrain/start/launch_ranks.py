"""Ranks that this process starts or waits for: their layout, their restarts after a loss, errors told to peers.

Used by pretrain, and by what it does before its ranks have met. Prints nothing: `report` is called with messages to
print. Torch is imported only if a failing process has peers to report to.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmtrain.config.typed_words import typed_words
from lmtrain.errors import AlreadyReported, LmtrainError, PeerLostError, StoppedEarly
from lmtrain.runtime.processes.local_rank_launcher import Outcome, launch
from lmtrain.runtime.processes.process_environment import ProcessEnv, Rendezvous
from lmtrain.runtime.processes.start_rank_processes import Program
from lmtrain.runtime.processes.stop_signals import ignore_stops
from lmtrain.runtime.terminal_safe_text import warn

if TYPE_CHECKING:
    from lmtrain.train.run_config import RunConfig
    from lmtrain.train.startup_checks.preflight import Inputs

_POLL_S = 0.25  # how often a process that waits for rank 0 looks whether it is done


def choose_layout(
    config: RunConfig, overrides: Sequence[str], env: ProcessEnv, report: Callable[[str], None], *, elastic: bool
) -> RunConfig:
    """Return `config` with a parallel layout for the number of processes in `env`: with `parallel=auto` a layout is
    chosen, with `elastic` the given one is changed to fit; else return it unchanged. `report` receives a choice or
    change on rank 0.

    `overrides` are the settings of the command line, which stay as they are.
    """
    from lmtrain.train.layouts.choose_parallel_layout import (
        adapt_to_processes,
        adaptation_message,
        choose_layout,
        fixed_layout_settings,
        previous_layout,
    )
    from lmtrain.train.startup_checks.preflight import find_model

    reports, messages = env.rank == 0 and not env.is_child, list[str]()
    if config.parallel.auto:
        fixed = fixed_layout_settings(config, typed_words(overrides))
        if (earlier_choice := previous_layout(config, fixed)) is not None:
            choice = earlier_choice.parallel.layout_text
            config, messages = earlier_choice, [f"parallel=auto: {choice}, as chosen when the run began"]
        else:
            config, messages = choose_layout(config, find_model(config), env.world_size, fixed)
    if elastic:
        fitted = adapt_to_processes(config, env.world_size)
        change = adaptation_message(config, fitted)
        config, messages = fitted, [*messages, *([change] if change else [])]
    for line in messages if reports else ():
        report(line)
    return config


def launch_with_restarts(
    program: Program, config: RunConfig, inputs: Inputs, env: ProcessEnv, max_restarts: int, *,
    report: Callable[[str], None], explain_no_server: Callable[[str], None],
) -> None:  # fmt: skip
    """Start this node's ranks of a training run, which run `program`, as child processes and wait for them to end. If
    one crashes, start all again from the newest checkpoint, at most `max_restarts` times. Raise
    AlreadyReported on a failure.

    Under srun each node runs such a launcher, and that of rank 0 reports for all. `explain_no_server` is called with
    the reason if the ranks cannot be forked from one server process.
    """
    from lmtrain.runfolder.read_and_record_run_end import (
        is_stop_written_since,
        outcome_from_watchdog,
        stop_stamp,
        write_process_failure,
        write_unsaved_stop,
    )
    from lmtrain.train.in_loop.failed_start_counter import LostStarts
    from lmtrain.train.startup_checks.preflight import find_resume_checkpoint

    folder = Path(config.run.dir)
    stamp_before = stop_stamp(folder)

    def before_restart(outcome: Outcome, number: int) -> None:
        nonlocal stamp_before
        failure = f"{outcome.reason} " if record_end(outcome) is None else ""
        stamp_before = stop_stamp(folder)
        path = find_resume_checkpoint(config)
        starts = LostStarts.for_run(config, inputs, path)
        starts.check_limit(config)
        place = f"from step {starts.step}, {path}" if path else "from the beginning, since nothing is saved yet"
        report(f"{failure}Start {number} of {max_restarts + 1} goes on {place}.")

    def record_end(outcome: Outcome) -> Outcome | None:
        """Write how the ranks ended to stop.json, unless the watchdog or another node has written the cause. Return the
        watchdog's report if it wrote one, else None.
        """
        reported = outcome_from_watchdog(folder, outcome, stamp_before)
        # because: if a rank of another node failed first, its launcher or rank 0 has written the cause
        is_written_elsewhere = env.rank > 0 and is_stop_written_since(folder, stamp_before)
        if reported is None and outcome.cause is not None and not is_written_elsewhere:
            # because: a run that was stopped before its ranks started may have no folder yet
            if outcome.is_before_ranks:
                warn(write_unsaved_stop(folder, outcome.cause))
            else:
                warn(write_process_failure(folder, outcome))
        return reported

    outcome = launch(
        program, env, max_restarts=max_restarts, on_restart=before_restart, report=report,
        explain_no_server=explain_no_server,
    )  # fmt: skip
    ignore_stops()  # because: srun asks the other nodes to stop once the first has ended, and this one has a result
    if outcome.is_before_ranks and env.has_peers:
        report_refusal(env, StoppedEarly(str(outcome.cause)))
    report_outcome(outcome, env, report, is_reported=record_end(outcome) is not None)


def report_outcome(
    outcome: Outcome, env: ProcessEnv, report: Callable[[str], None], *, is_reported: bool = False
) -> None:
    """Report why the ranks of this node ended, unless it `is_reported`. Raise AlreadyReported if they have failed."""
    reports = env.rank == 0 or not outcome.stopped  # because: all nodes are asked to stop
    if outcome.cause is not None and not is_reported and reports:
        way_out = " Start the same command again to go on." * (outcome.is_restartable or outcome.stopped)
        report(f"{'' if outcome.stopped else 'error: '}{outcome.cause}{way_out}")
    # because: srun names the node and the code of the first task that fails, which tells where a rank was killed
    code = outcome.shell_code if env.launcher == "slurm" else outcome.exit_code
    if code != 0:
        raise AlreadyReported(code)


def report_refusal(env: ProcessEnv, error: LmtrainError, *, peers_fail_too: bool = False) -> None:
    """Send `error`, which keeps this process from starting, to the other ranks, so that they do not wait for it. Do
    nothing if the environment names no address at which the ranks meet.

    `peers_fail_too` states that every process finds the same error itself.
    """
    try:
        Rendezvous.detect(env)
    except LmtrainError:
        return  # because: without a rendezvous there is no way to reach peers, and torch takes seconds to import
    from lmtrain.runtime.processes.rendezvous import report_refusal

    report_refusal(env, error, peers_fail_too=peers_fail_too)


def wait_for_rank_0(
    env: ProcessEnv, timeout_s: float, is_done: Callable[[], bool], task: str, progress: Callable[[], object]
) -> None:
    """Wait, on a rank other than 0, until `is_done()` returns True because rank 0 has finished a task for all ranks.
    `task` names what rank 0 makes, for the error message; `progress()` returns any value that changes while rank 0
    works.

    Raise the error of rank 0 if it reports one, and PeerLostError if there is no progress for `timeout_s`.
    """
    seen, since_s = progress(), time.monotonic()
    while not is_done():
        if _is_store_open(env):  # because: rank 0 opens it to report an error, or when it goes on
            from lmtrain.runtime.processes.rendezvous import raise_refusal

            return raise_refusal(env, timeout_s, is_done)
        if (now := progress()) != seen:
            seen, since_s = now, time.monotonic()
        elif time.monotonic() - since_s > timeout_s:
            raise PeerLostError(
                f"{env.label} waited for {task}, which rank 0 makes, and saw no progress for "
                f"parallel.timeout_s={timeout_s:g}. Look at the output of rank 0; its folder must be one that all "
                "processes see."
            )
        time.sleep(_POLL_S)
    return None


def _is_store_open(env: ProcessEnv) -> bool:
    """Return True if rank 0 accepts connections at the address where the ranks meet. Return False if torchrun holds
    that address, since it accepts them all the time.
    """
    rendezvous = Rendezvous.detect(env)
    if rendezvous.held_by_launcher:
        return False
    try:
        socket.create_connection((rendezvous.host, rendezvous.port), timeout=1.0).close()
    except OSError:
        return False
    return True
