"""Our own launcher: it runs N ranks of one command on this machine, which end together. Torch-free.

`lmtrain pretrain --nproc N` calls `launch` in the parent; each child calls `end_with_launcher`. The parent forwards
signals, shows the output of rank 0 unchanged and that of other ranks with their number, names the rank that failed
first, and restarts all ranks if one was lost. It does not depend on what the children compute.
"""

from __future__ import annotations

import errno
import itertools
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from lmtrain.errors import LmtrainError, PeerLostError, StoppedEarly, StoppedForGood
from lmtrain.runtime.processes.command_watch import end_watch
from lmtrain.runtime.processes.process_environment import STORE_FD_VARIABLE, ProcessEnv
from lmtrain.runtime.processes.start_rank_processes import (
    OrphanAdoption,
    Program,
    RankStarter,
    StartCancelledError,
    is_in_state,
)
from lmtrain.runtime.processes.stop_signals import STOPS

_MAX_LINES_KEPT = 50  # of each rank
_OUTPUT_WAIT_S = 1.0  # because: a helper of a dead child may hold its output open
# exit codes after which the other ranks go on to their own end
_PEACEFUL_CODES = (0, StoppedEarly.exit_code, StoppedForGood.exit_code)
CRASH_CODE = 1  # Python's, with a traceback
# because: any other failure would only happen again, or is an end that was requested
RESTARTABLE_CODES = (CRASH_CODE, LmtrainError.exit_code, PeerLostError.exit_code)
GUARDIAN = "lmtrain.runtime.processes.kill_orphaned_ranks"
_POLL_S = 1.0
GRACE_S = 10.0  # because: survivors get gloo's error within a second, their messages help, and ending takes a while
PAUSE_S = 1.0  # before a restart, so that a device or a disk can recover from a short failure


class RankOutputs:
    """Copies the output of ranks other than 0 to standard error, each line with its rank, and keeps the last lines."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._last_lines: dict[int, deque[str]] = {rank: deque(maxlen=_MAX_LINES_KEPT) for rank in ranks}
        self._threads: list[threading.Thread] = []

    def add(self, rank: int, output: IO[str]) -> None:
        """Start a thread that copies a rank's output until it closes."""
        self._threads.append(threading.Thread(target=self._copy_lines, args=(rank, output), daemon=True))
        self._threads[-1].start()

    def finish(self) -> None:
        """Wait for the threads that read the output of processes that have ended."""
        for thread in self._threads:
            thread.join(timeout=_OUTPUT_WAIT_S)

    def has_output(self, rank: int) -> bool:
        """Return whether a rank other than 0 has printed anything."""
        return any(line.strip() for line in self._last_lines[rank])

    def last_error(self, rank: int) -> str:
        """Return the last error message that a rank printed (the text after "error: "), or its last line if it printed
        none, such as the end of a traceback, or "it printed nothing". Only the output of ranks other than 0 is kept.
        """
        lines = [line for line in self._last_lines[rank] if line.strip()]
        errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
        return (errors or lines or ["it printed nothing"])[-1]

    def _copy_lines(self, rank: int, output: IO[str]) -> None:
        with output:
            for line in output:
                self._last_lines[rank].append(line.rstrip("\n"))
                sys.stderr.write(f"[rank {rank}] {line}")
                sys.stderr.flush()


@dataclass(frozen=True)
class Outcome:
    """The end of a job: the exit code and rank of the process that failed first, and the cause for a message."""

    exit_code: int
    rank: int | None = None
    cause: str | None = None  # None if rank 0 has printed it
    signal: int = 0  # the signal that ended the rank, 0 if none did

    @property
    def is_restartable(self) -> bool:
        """True if another start may help, since a rank was killed, crashed or lost a peer."""
        return self.exit_code in RESTARTABLE_CODES

    @property
    def stopped(self) -> bool:
        return self.exit_code == StoppedEarly.exit_code

    @property
    def shell_code(self) -> int:
        """The exit code for the shell: 128 + the signal if a signal ended the rank, else `exit_code`."""
        return 128 + self.signal if self.signal else self.exit_code

    @property
    def is_before_ranks(self) -> bool:
        """True if a stop was requested before all ranks were started."""
        return self.stopped and self.rank is None and self.cause is not None

    @property
    def reason(self) -> str:
        """The cause of the end, for a reader who has not seen the output of rank 0."""
        return self.cause or f"rank {self.rank} failed with exit code {self.exit_code}, as it says above."


def launch(
    program: Program, env: ProcessEnv, *, grace_s: float = GRACE_S, max_restarts: int = 0,
    on_restart: Callable[[Outcome, int], None] = lambda outcome, attempt: None,
    report: Callable[[str], None] = lambda text: None, explain_no_server: Callable[[str], None] = lambda text: None,
) -> Outcome:  # fmt: skip
    """Run the program as one job, a process for each rank that this launcher starts (`env` says which), and return how
    the job ended once the last process has ended. After the first failure the other ranks have `grace_s` seconds before
    they are killed. A job that lost a rank is restarted, up to `max_restarts` times. Callbacks: `on_restart` gets the
    outcome and the number of the next start, and may raise; `report` gets messages about the fork server;
    `explain_no_server` gets the reason if no fork server is used.

    A restart begins with a new store and token once all processes of the job are gone.
    """
    end_watch()  # because: the ranks print and answer from here on, and only a process with one thread forks safely
    with _StopForwarder() as stops, OrphanAdoption():
        starter = RankStarter(
            program, env.shared_environment(), env.host, report=report, explain_no_server=explain_no_server,
            is_cancelled=lambda: bool(stops.received),
        )  # fmt: skip
        with closing(starter):
            for attempt in itertools.count(1):
                is_last = attempt > max_restarts
                outcome = _Job(program, env, starter, grace_s, stops, is_last=is_last).run(attempt - 1)
                # because: srun stops all nodes if one has lost a rank, and the lost rank is the cause to report
                if outcome.is_restartable and stops.received and env.launcher != "slurm":
                    return _stopped_outcome(outcome, stops, "was stopped")
                if not outcome.is_restartable or is_last:
                    return outcome
                on_restart(outcome, attempt + 1)
                if stops.stop_event.wait(PAUSE_S):
                    return _stopped_outcome(outcome, stops, "was to start again")
    raise AssertionError


def end_with_launcher() -> None:
    """End this rank as soon as its launcher has ended: a thread waits until the pipe at standard input closes."""
    threading.Thread(target=_wait_for_parent_end, name="end_with_launcher", daemon=True).start()


def _wait_for_parent_end() -> None:
    with suppress(OSError):
        while os.read(0, 1):
            pass
    # because: the rank leads a process group of its own, so helpers such as compilers end with it
    os.killpg(0, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _reap_group(pid: int) -> None:
    """Reap all ended processes of the group that `pid` leads: helpers of a rank, which this process has adopted."""
    with suppress(ChildProcessError):
        while os.waitpid(-pid, os.WNOHANG)[0]:
            pass


def _stopped_outcome(outcome: Outcome, stops: _StopForwarder, when: str) -> Outcome:
    """Return the outcome of a job that is not restarted because the launcher got a stop signal: the exit code of
    StoppedEarly, and a cause that names the signal. `outcome` says how the job itself ended; `when` completes "SIGTERM
    came while the run ...".
    """
    return Outcome(
        StoppedEarly.exit_code, outcome.rank, f"{stops.first_name} came while the run {when}: {outcome.reason}"
    )


class _StopForwarder:
    """Receives the launcher's stop signals, from the first start of the ranks to their last end, and sends them to the
    ranks.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.job: _Job | None = None
        self.stop_event = threading.Event()
        self._before: dict[int, Any] = {}

    @property
    def first_name(self) -> str:
        return signal.Signals(self.received[0]).name

    def __enter__(self) -> _StopForwarder:
        self._before = {number: signal.signal(number, self._receive) for number in STOPS}
        # because: for a process that ignores SIGCHLD, as some services do, the system keeps no exit codes of children
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self.stop_event.set()
        if self.job is not None:
            self.job.send(number)


@dataclass
class _Job:
    """A single start of all ranks of this launcher; a restart is another job."""

    program: Program
    env: ProcessEnv
    starter: RankStarter
    grace_s: float
    stops: _StopForwarder
    is_last: bool = True  # whether there is no restart after it
    guardian_pid: int = -1
    guardian_fd: int = -1  # the pipe by which the guardian receives the process ids of the ranks
    pids: list[int] = field(default_factory=list)  # by local rank
    codes: dict[int, int] = field(default_factory=dict)  # exit codes by local rank, of the ranks that have ended
    ended: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)  # local ranks, in the order of their ends

    def run(self, num_restarts: int) -> Outcome:
        """Start all ranks, wait until they have ended or were killed, and return how the job ended. `num_restarts` is
        how often the job has been restarted so far.
        """
        self.outputs = RankOutputs(range(self.env.rank, self.env.rank + self.env.num_ranks))
        parent_pipe, alive_fd = os.pipe()
        try:
            try:
                self._start_guardian()
                self._start(parent_pipe, num_restarts)
            except StartCancelledError:
                return Outcome(
                    StoppedEarly.exit_code, None, f"{self.stops.first_name} came before all ranks were started."
                )
            except RuntimeError as error:
                if "thread" not in str(error):
                    raise
                # because: Python raises this for a refused thread, and OSError for a process refused by the same limit
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
            finally:
                os.close(parent_pipe)
            if self.is_last:
                self.starter.close_server()  # because: no more ranks are forked
            self.stops.job = self
            for number in self.stops.received:  # signals that came while ranks were being started
                self.send(number)
            failed, killed = self._wait_for_ranks()
            self.outputs.finish()
        finally:
            self.stops.job = None
            self._end_guardian()  # because: it must not kill ids that other processes have got since
            os.close(alive_fd)  # because: this also ends a rank that was forked just before its server was lost
            for pid in self.pids:
                self._kill_and_reap(pid)
            for pid in self.pids:
                _reap_group(pid)  # because: a helper may have been a helper's child until just now
        return self._outcome(failed, sorted(killed))

    def send(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def _start(self, parent_pipe: int, num_restarts: int) -> None:
        """Start all ranks of this node. Their standard input is `parent_pipe`, a pipe that closes when the launcher
        ends. `num_restarts` is how often the job has been restarted so far.

        The store's socket listens before any rank runs, so that its port cannot be taken.
        """
        with (
            socket.create_server(("127.0.0.1", 0), backlog=self.env.num_ranks) as store,
            open(os.devnull, "wb") as null,
        ):
            # because: if this process was started without an output stream, another file may have its descriptor
            outputs = [
                fd if stream is not None else null.fileno()
                for fd, stream in ((1, sys.__stdout__), (2, sys.__stderr__))
            ]
            port, token, is_watched = store.getsockname()[1], secrets.token_hex(16), self.env.world_size > 1
            for local_rank in range(self.env.num_ranks):
                rank = self.env.rank + local_rank
                read_fd, write_fd = os.pipe() if rank else (-1, -1)
                try:
                    pid = self.starter.start(
                        (parent_pipe, write_fd, write_fd) if rank else (parent_pipe, outputs[0], outputs[1]),
                        self.env.rank_environment(local_rank, port, token, num_restarts=num_restarts),
                        title=f"rank {rank} of {self.env.world_size}", name=f"lmtrain rank {rank}",
                        keep=(STORE_FD_VARIABLE, store.fileno())
                        if rank == 0 and self.env.launcher != "slurm" else None,
                        helper=(f"companion of rank {rank}", f"lmtrain watch {rank}") if is_watched else None,
                        announce=self._add_to_guardian,
                    )  # fmt: skip
                except BaseException:
                    if rank:
                        os.close(read_fd)
                    raise
                finally:
                    if rank:
                        os.close(write_fd)
                self.pids.append(pid)
                threading.Thread(target=self._report_end, args=(local_rank,), daemon=True).start()
                if rank:
                    self.outputs.add(rank, os.fdopen(read_fd, errors="replace"))

    def _add_to_guardian(self, *pids: int) -> None:
        """Add the processes `pids` to those that the guardian kills if the launcher is killed. The guardian is a
        process of its own; if it has ended, start a new one.
        """
        try:
            os.write(self.guardian_fd, b"".join(b"%d\n" % pid for pid in pids))
        except BrokenPipeError:
            self._start_guardian()
            os.write(self.guardian_fd, b"".join(b"%d\n" % pid for pid in [*self.pids, *pids]))

    def _start_guardian(self) -> None:
        """Start the guardian, the process that kills the ranks if the launcher is killed; an earlier guardian is ended.
        """
        self._end_guardian()
        read_fd, write_fd = os.pipe()
        null_fd = os.open(os.devnull, os.O_WRONLY)
        try:
            self.guardian_pid = self.starter.start(
                (read_fd, null_fd, null_fd), {}, title="guardian", name="lmtrain guard", other_module=(GUARDIAN, ())
            )
            self.guardian_fd = write_fd
        except BaseException:
            os.close(write_fd)
            raise
        finally:
            os.close(read_fd)
            os.close(null_fd)

    def _check_guardian(self) -> None:
        """Start a new guardian, the process that kills the ranks if the launcher is killed, if the old one has ended.
        If that fails, the job goes on without a guardian until the next check.
        """
        if self.guardian_pid < 0 or is_in_state(os.WEXITED, self.guardian_pid):
            with suppress(OSError, StartCancelledError):
                self._start_guardian()
                self._add_to_guardian(*self.pids)

    def _end_guardian(self) -> None:
        if self.guardian_pid > 0:
            self._kill_and_reap(self.guardian_pid)
            os.close(self.guardian_fd)
        self.guardian_pid = self.guardian_fd = -1

    def _wait_for_ranks(self) -> tuple[list[int], set[int]]:
        """Wait until all ranks have ended. Return the local ranks that failed, in the order of their ends, and the
        local ranks that had to be killed. Ranks are killed `grace_s` seconds after the first failure, or after SIGSTOP
        has stopped all that are left.
        """
        alive, failed, killed = set(range(self.env.num_ranks)), list[int](), set[int]()
        deadline: float | None = None
        while alive:
            try:
                # because: a signal that the system delivers to another thread does not end a wait without a timeout
                timeout_s = _POLL_S if deadline is None else max(0.0, deadline - time.monotonic())
                rank = self.ended.get(timeout=timeout_s)
            except queue.Empty:
                self.starter.check_server()
                self._check_guardian()
                if deadline is None and len(alive) < self.env.num_ranks and all(
                    is_in_state(os.WSTOPPED, self.pids[rank]) for rank in alive
                ):
                    deadline = time.monotonic() + self.grace_s  # because: no running rank is left to notice
                elif deadline is not None:
                    killed, deadline = set(alive), None
                    for rank in killed:  # even if stopped, with all processes that it has started
                        _kill_group(self.pids[rank])
                continue
            alive.discard(rank)
            if self.codes[rank] not in _PEACEFUL_CODES and rank not in killed:
                failed.append(rank)
                deadline = deadline or time.monotonic() + self.grace_s
        return failed, killed

    def _kill_and_reap(self, pid: int) -> None:
        """Kill the process `pid` and its process group, since a helper may outlive it, and reap all of them."""
        _kill_group(pid)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        _reap_group(pid)

    def _report_end(self, rank: int) -> None:
        """Wait, in a thread of its own, until a local rank has ended; record its exit code and put it into the queue of
        ended ranks.
        """
        # because: unreaped ranks keep their process ids, so that no signal can reach another process
        with suppress(ChildProcessError):  # because: if a start fails, the clean-up may have reaped it
            end = os.waitid(os.P_PID, self.pids[rank], os.WEXITED | os.WNOWAIT)
            assert end is not None
            self.codes[rank] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            self.ended.put(rank)

    def _outcome(self, failed: list[int], killed: list[int]) -> Outcome:
        """Return how the job ended: the rank that failed first, its exit code and the cause for a message. `failed` are
        local ranks in the order of their ends, `killed` the local ranks that the launcher had to kill.
        """
        codes, first = self.codes, self.env.rank
        # because: survivors may end sooner than the rank whose failure they report
        own_failures = [rank for rank in failed if codes[rank] != PeerLostError.exit_code]
        if killed and not own_failures:
            when = "while the others waited" if failed else "when the others had ended"
            names = self.env.name_ranks([first + rank for rank in killed])
            return Outcome(PeerLostError.exit_code, first + killed[0], f"{names} hung {when}, and had to be killed.")
        if not failed:
            return Outcome(max(codes.values()))
        local_rank = (own_failures or failed)[0]
        code = codes[local_rank]
        same_code = [rank for rank in failed if codes[rank] == code]
        if 0 in same_code and first == 0:
            local_rank = 0  # because: if several ranks end for the same reason, rank 0 reports it
        elif first > 0:
            local_rank = next((rank for rank in same_code if self.outputs.has_output(first + rank)), min(same_code))
        rank = first + local_rank
        if -code in self.stops.received:
            name = signal.Signals(-code).name
            return Outcome(StoppedEarly.exit_code, rank, f"{name} ended rank {rank} at once, and the others with it.")
        rest = f"; the other {len(killed)} had to be killed" if killed else ""
        if code < 0:
            name = signal.Signals(-code).name
            return Outcome(
                PeerLostError.exit_code, rank,
                f"{self.env.name_ranks([rank])} was ended by {name}, and the run with it{rest}.", signal=-code,
            )  # fmt: skip
        cause = f"{self.env.name_ranks([rank])} failed with exit code {code}{rest}: {self.outputs.last_error(rank)}"
        # whether the ranks of this node ended for a reason of the whole run, which rank 0 reports on its node
        silent = set(self.codes.values()) == {code} and not self.outputs.has_output(rank)
        reported_elsewhere = self.env.launcher == "slurm" and (code == PeerLostError.exit_code or silent)
        return Outcome(code, rank, None if rank == 0 or reported_elsewhere else f"{cause.rstrip('.')}.")
