"""Our own launcher: N processes of one command on this machine, which end together. Torch-free.

`lmtrain pretrain --nproc N` calls `launch` in the parent; each child calls `follow_launcher`. The parent forwards
signals, shows rank 0 as it is and the others' lines under their rank, names the process that failed first, and starts
all of them again where one was lost. It must not know what the children compute.
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
from lmtrain.runtime.processes.process import STORE_FD, NodeRanks
from lmtrain.runtime.processes.rank_starter import Program, RankStarter, StartCancelledError, adopting_orphans
from lmtrain.runtime.processes.signals import STOPS

_NUM_LINES = 50  # that are remembered of each
_LAST_S = 1.0  # because: a helper of a dead child may hold its output open
_PEACEFUL = (0, StoppedEarly.exit_code, StoppedForGood.exit_code)  # ends after which the others may go on to theirs
CRASH = 1  # of Python, with a traceback
# because: all others would only be met again, or are what was asked for
LOST = (CRASH, LmtrainError.exit_code, PeerLostError.exit_code)
GUARDIAN = "lmtrain.runtime.processes.guardian"
_LOOK_S = 1.0
GRACE_S = 10.0  # because: gloo tells survivors within a second, what they then say helps, and ending takes a while
PAUSE_S = 1.0  # before a start after the first: time for a device or a disk that failed for a moment


class Speakers:
    def __init__(self, ranks: Iterable[int]) -> None:
        self._last_lines: dict[int, deque[str]] = {rank: deque(maxlen=_NUM_LINES) for rank in ranks}
        self._threads: list[threading.Thread] = []

    def add(self, rank: int, output: IO[str]) -> None:
        self._threads.append(threading.Thread(target=self._speak, args=(rank, output), daemon=True))
        self._threads[-1].start()

    def finish(self) -> None:
        """Wait for the threads that read the output of processes that have ended."""
        for thread in self._threads:
            thread.join(timeout=_LAST_S)

    def has_spoken(self, rank: int) -> bool:
        """Return whether a rank other than 0 has printed anything."""
        return any(line.strip() for line in self._last_lines[rank])

    def last_words(self, rank: int) -> str:
        """Return the error of a rank, or the last line of its traceback."""
        lines = [line for line in self._last_lines[rank] if line.strip()]
        errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
        return (errors or lines or ["it said nothing"])[-1]

    def _speak(self, rank: int, output: IO[str]) -> None:
        with output:
            for line in output:
                self._last_lines[rank].append(line.rstrip("\n"))
                sys.stderr.write(f"[rank {rank}] {line}")
                sys.stderr.flush()


@dataclass(frozen=True)
class Outcome:
    """How it ended: the exit code of the process that failed first, and what to say of it."""

    exit_code: int
    rank: int | None = None
    cause: str | None = None  # None where rank 0 has said it
    signal: int = 0  # that ended the rank, where one did

    @property
    def lost(self) -> bool:
        """True if another start may help, since a rank was killed, crashed or lost a peer."""
        return self.exit_code in LOST

    @property
    def stopped(self) -> bool:
        return self.exit_code == StoppedEarly.exit_code

    @property
    def shell_code(self) -> int:
        """The exit code that a shell gives to a process that a signal has ended, where one has ended the rank."""
        return 128 + self.signal if self.signal else self.exit_code

    @property
    def is_before_ranks(self) -> bool:
        """True if a stop was requested before all ranks were started."""
        return self.stopped and self.rank is None and self.cause is not None

    @property
    def told(self) -> str:
        """The reason of the end, for a reader who has not seen the output of rank 0."""
        return self.cause or f"rank {self.rank} failed with exit code {self.exit_code}, as it says above."


def launch(
    program: Program, ranks: NodeRanks, *, grace_s: float = GRACE_S, max_restarts: int = 0,
    restarting: Callable[[Outcome, int], None] = lambda outcome, number: None,
    say: Callable[[str], None] = lambda text: None, explain: Callable[[str], None] = lambda text: None,
) -> Outcome:  # fmt: skip
    """Run the program once for each rank, as one job; return when the last of them has ended.

    A job that was lost starts again, up to `max_restarts` times: with a store and a token of its own, and once all
    processes of the last one are gone. `restarting` gets how that ended and which start comes next; it may raise.
    `say` gets what happens to the server that forks the ranks, `explain` why there is none.
    """
    with _Stops() as stops, adopting_orphans():
        starter = RankStarter(
            program, ranks.shared_environment(), ranks.host, say=say, explain=explain,
            is_cancelled=lambda: bool(stops.received),
        )  # fmt: skip
        with closing(starter):
            for number in itertools.count(1):
                is_last = number > max_restarts
                outcome = _Job(program, ranks, starter, grace_s, stops, is_last=is_last).run(number - 1)
                # because: srun asks all nodes to stop where one has lost a rank, and what was lost comes first
                if outcome.lost and stops.received and ranks.launcher != "slurm":
                    return _stopped(outcome, stops, "was stopped")
                if not outcome.lost or is_last:
                    return outcome
                restarting(outcome, number + 1)
                if stops.came.wait(PAUSE_S):
                    return _stopped(outcome, stops, "was to start again")
    raise AssertionError


def follow_launcher() -> None:
    """End this child as soon as its parent has ended, which closes the pipe that is this process' input."""
    threading.Thread(target=_end_with_parent, name="follow_launcher", daemon=True).start()


def _end_with_parent() -> None:
    with suppress(OSError):
        while os.read(0, 1):
            pass
    # because: the child leads a process group of its own; helpers such as compilers go with it
    os.killpg(0, signal.SIGKILL)


def _has_come_to(state: int, pid: int) -> bool:
    """Return whether a child of this process has ended (os.WEXITED) or stands still by SIGSTOP (os.WSTOPPED).

    What is known of its end is kept.
    """
    try:
        return os.waitid(os.P_PID, pid, state | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return state == os.WEXITED  # because: that is how the system tells of one that has just ended


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _reap_group(pid: int) -> None:
    """Take leave of processes of this group that have ended: helpers of a rank, which this process has adopted."""
    with suppress(ChildProcessError):
        while os.waitpid(-pid, os.WNOHANG)[0]:
            pass


def _stopped(outcome: Outcome, stops: _Stops, when: str) -> Outcome:
    """Asked to stop, and lost on the way or before it could start again: the scheduler's next start goes on."""
    return Outcome(
        StoppedEarly.exit_code, outcome.rank, f"{stops.first_name} came while the run {when}: {outcome.told}"
    )


class _Stops:
    """Hears what asks for a stop, from the first start to the last end, and hands it on to the processes there are."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.job: _Job | None = None
        self.came = threading.Event()
        self._before: dict[int, Any] = {}

    @property
    def first_name(self) -> str:
        return signal.Signals(self.received[0]).name

    def __enter__(self) -> _Stops:
        self._before = {number: signal.signal(number, self._receive) for number in STOPS}
        # because: of a process that ignores it, as some services do, the system keeps no child's exit code
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self.came.set()
        if self.job is not None:
            self.job.send(number)


@dataclass
class _Job:
    """A start of all ranks of this launcher."""

    program: Program
    ranks: NodeRanks
    starter: RankStarter
    grace_s: float
    stops: _Stops
    is_last: bool = True  # nothing is started after it
    guardian: int = -1  # its process id, and where it receives those of the ranks
    guarded_fd: int = -1
    pids: list[int] = field(default_factory=list)  # by local rank
    codes: dict[int, int] = field(default_factory=dict)  # of those that have ended
    ended: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)  # local ranks, in the order of their ends

    def run(self, num_restarts: int) -> Outcome:
        self.speakers = Speakers(range(self.ranks.first, self.ranks.first + self.ranks.count))
        parent_lives, alive_fd = os.pipe()
        try:
            try:
                self._start_guardian()
                self._start(parent_lives, num_restarts)
            except StartCancelledError:
                return Outcome(
                    StoppedEarly.exit_code, None, f"{self.stops.first_name} came before all ranks were started."
                )
            except RuntimeError as error:
                if "thread" not in str(error):
                    raise
                # because: it is Python's error for what the system refuses as it refuses a process
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
            finally:
                os.close(parent_lives)
            if self.is_last:
                self.starter.close_server()  # because: nothing more is asked of it
            self.stops.job = self
            for number in self.stops.received:  # those that came while processes were being started
                self.send(number)
            failed, killed = self._wait()
            self.speakers.finish()
        finally:
            self.stops.job = None
            self._end_guardian()  # because: it must not outlive the ids that it was given
            os.close(alive_fd)  # because: ends a process too that was forked just before its server was lost
            for pid in self.pids:
                self._end(pid)
            for pid in self.pids:
                _reap_group(pid)  # because: a helper may have been a helper's child until just now
        return self._outcome(failed, sorted(killed))

    def send(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def _start(self, parent_lives: int, num_restarts: int) -> None:
        """Start all ranks; the store's socket listens before any of them runs, so that its port cannot be taken."""
        with (
            socket.create_server(("127.0.0.1", 0), backlog=self.ranks.count) as store,
            open(os.devnull, "wb") as nowhere,
        ):
            # because: where this process was started without an output, another file may have its number
            outputs = [
                number if stream is not None else nowhere.fileno()
                for number, stream in ((1, sys.__stdout__), (2, sys.__stderr__))
            ]
            port, token, is_watched = store.getsockname()[1], secrets.token_hex(16), self.ranks.num_all > 1
            for local_rank in range(self.ranks.count):
                rank = self.ranks.first + local_rank
                reads, writes = os.pipe() if rank else (-1, -1)
                try:
                    pid = self.starter.start(
                        (parent_lives, writes, writes) if rank else (parent_lives, outputs[0], outputs[1]),
                        self.ranks.environment(local_rank, port, token, num_restarts=num_restarts),
                        title=f"rank {rank} of {self.ranks.num_all}", name=f"lmtrain rank {rank}",
                        keep=(STORE_FD, store.fileno()) if rank == 0 and self.ranks.launcher == "lmtrain" else None,
                        helper=(f"companion of rank {rank}", f"lmtrain watch {rank}") if is_watched else None,
                        announce=self._guard,
                    )  # fmt: skip
                except BaseException:
                    if rank:
                        os.close(reads)
                    raise
                finally:
                    if rank:
                        os.close(writes)
                self.pids.append(pid)
                threading.Thread(target=self._report_end, args=(local_rank,), daemon=True).start()
                if rank:
                    self.speakers.add(rank, os.fdopen(reads, errors="replace"))

    def _guard(self, *pids: int) -> None:
        """Let the guardian end these processes if this one is killed. A guardian that was killed is replaced."""
        try:
            os.write(self.guarded_fd, b"".join(b"%d\n" % pid for pid in pids))
        except BrokenPipeError:
            self._start_guardian()
            os.write(self.guarded_fd, b"".join(b"%d\n" % pid for pid in [*self.pids, *pids]))

    def _start_guardian(self) -> None:
        """Start the process that ends the ranks if this one is killed, in place of one that was there before."""
        self._end_guardian()
        reads, writes = os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            self.guardian = self.starter.start(
                (reads, nowhere, nowhere), {}, title="guardian", name="lmtrain guard", other=(GUARDIAN, ())
            )
            self.guarded_fd = writes
        except BaseException:
            os.close(writes)
            raise
        finally:
            os.close(reads)
            os.close(nowhere)

    def _look_at_guardian(self) -> None:
        """Replace it if it has ended; where that fails, the run goes on without one until the next look."""
        if self.guardian < 0 or _has_come_to(os.WEXITED, self.guardian):
            with suppress(OSError, StartCancelledError):
                self._start_guardian()
                self._guard(*self.pids)

    def _end_guardian(self) -> None:
        if self.guardian > 0:
            self._end(self.guardian)
            os.close(self.guarded_fd)
        self.guardian = self.guarded_fd = -1

    def _wait(self) -> tuple[list[int], set[int]]:
        """Ranks that failed, in the order of their ends, and those that had to be killed."""
        alive, failed, killed = set(range(self.ranks.count)), list[int](), set[int]()
        deadline: float | None = None
        while alive:
            try:
                # because: a signal that the system hands to another thread wakes nobody who waits without an end
                left = _LOOK_S if deadline is None else max(0.0, deadline - time.monotonic())
                rank = self.ended.get(timeout=left)
            except queue.Empty:
                self.starter.look()
                self._look_at_guardian()
                if deadline is None and len(alive) < self.ranks.count and all(
                    _has_come_to(os.WSTOPPED, self.pids[rank]) for rank in alive
                ):
                    deadline = time.monotonic() + self.grace_s  # because: nobody is left who would miss them
                elif deadline is not None:
                    killed, deadline = set(alive), None
                    for rank in killed:  # also where they stand still, with all that they have started
                        _kill_group(self.pids[rank])
                continue
            alive.discard(rank)
            if self.codes[rank] not in _PEACEFUL and rank not in killed:
                failed.append(rank)
                deadline = deadline or time.monotonic() + self.grace_s
        return failed, killed

    def _end(self, pid: int) -> None:
        """Kill a process and its group, since a helper may outlive it, and take leave of all of them."""
        _kill_group(pid)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        _reap_group(pid)

    def _report_end(self, rank: int) -> None:
        # because: until all have ended none gives its number back, under which a signal would meet a stranger
        with suppress(ChildProcessError):  # because: where a start fails, whoever cleans up may be quicker
            end = os.waitid(os.P_PID, self.pids[rank], os.WEXITED | os.WNOWAIT)
            assert end is not None
            self.codes[rank] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            self.ended.put(rank)

    def _outcome(self, failed: list[int], killed: list[int]) -> Outcome:
        codes, first = self.codes, self.ranks.first
        # because: survivors may be quicker to end than the one whose failure they report
        by_itself = [rank for rank in failed if codes[rank] != PeerLostError.exit_code]
        if killed and not by_itself:
            waited = "while the others waited" if failed else "when the others had ended"
            still = f"{self.ranks.name([first + rank for rank in killed])} stood still {waited}, and had to be killed."
            return Outcome(PeerLostError.exit_code, first + killed[0], still)
        if not failed:
            return Outcome(max(codes.values()))
        local_rank = (by_itself or failed)[0]
        code = codes[local_rank]
        alike = [rank for rank in failed if codes[rank] == code]
        if 0 in alike and first == 0:
            local_rank = 0  # because: where several end for one reason, rank 0 speaks for all
        elif first > 0:
            local_rank = next((rank for rank in alike if self.speakers.has_spoken(first + rank)), min(alike))
        rank = first + local_rank
        if -code in self.stops.received:
            name = signal.Signals(-code).name
            return Outcome(StoppedEarly.exit_code, rank, f"{name} ended rank {rank} at once, and the others with it.")
        rest = f"; the other {len(killed)} had to be killed" if killed else ""
        if code < 0:
            lost = f"{self.ranks.name([rank])} was ended by {signal.Signals(-code).name}, and the run with it{rest}."
            return Outcome(PeerLostError.exit_code, rank, lost, signal=-code)
        cause = f"{self.ranks.name([rank])} failed with exit code {code}{rest}: {self.speakers.last_words(rank)}"
        # whether ranks of this node ended for a reason of the whole run, which rank 0 says on its node
        silent = set(self.codes.values()) == {code} and not self.speakers.has_spoken(rank)
        said_there = self.ranks.launcher == "slurm" and (code == PeerLostError.exit_code or silent)
        return Outcome(code, rank, None if rank == 0 or said_there else f"{cause.rstrip('.')}.")
