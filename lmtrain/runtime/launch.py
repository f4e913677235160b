"""Our own launcher: N processes of one command on this machine, which end together. Torch-free.

`lmtrain pretrain --nproc N` calls `launch` in the parent; each child calls `follow_launcher`. The parent forwards
signals, shows rank 0 as it is and the others' lines under their rank, and names the process that failed first. It must
not know what the children compute.
"""

from __future__ import annotations

import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO

from lmtrain.errors import PeerLostError, StoppedEarly
from lmtrain.runtime.process import child_environment, ranks_text

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PEACEFUL = (0, StoppedEarly.exit_code)  # ends after which the others may go on to theirs
_LOOK_S = 1.0
GRACE_S = 10.0  # because: gloo tells survivors within a second, what they then say helps, and ending takes a while


@dataclass(frozen=True)
class Outcome:
    """How it ended: the exit code of the process that failed first, and what to say of it."""

    exit_code: int
    rank: int | None = None
    cause: str | None = None  # None where rank 0 has said it


def launch(command: Sequence[str], num_processes: int, *, grace_s: float = GRACE_S) -> Outcome:
    """Run the command `num_processes` times as one job; back when the last of them has ended."""
    job = _Job(num_processes, grace_s)
    with job.forwarding_signals():
        job.start(command)
        return job.wait()


def follow_launcher() -> None:
    """In a child: end with the parent, however that ends. Its end closes the pipe that is this process' input."""
    threading.Thread(target=_end_with_parent, name="follow_launcher", daemon=True).start()


def _end_with_parent() -> None:
    with suppress(OSError):
        while os.read(0, 1):
            pass
    # because: the child leads a process group of its own; helpers such as compilers go with it
    os.killpg(0, signal.SIGKILL)


class _Job:
    def __init__(self, num_processes: int, grace_s: float) -> None:
        self._num, self._grace_s = num_processes, grace_s
        self._children: list[subprocess.Popen[str]] = []
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()  # ranks, in the order of their ends
        self._last_lines: list[deque[str]] = [deque(maxlen=50) for _ in range(num_processes)]
        self._speakers: list[threading.Thread] = []
        self._signals: list[int] = []  # received so far

    def start(self, command: Sequence[str]) -> None:
        """All children; the store's socket listens before any of them runs, so that its port cannot be taken."""
        with socket.create_server(("127.0.0.1", 0), backlog=self._num) as store:
            parent_lives, self._alive_fd = os.pipe()
            port, token = store.getsockname()[1], secrets.token_hex(16)
            for rank in range(self._num):
                fds = (store.fileno(),) if rank == 0 else ()
                child = subprocess.Popen(
                    list(command), stdin=parent_lives, pass_fds=fds, text=True, errors="replace",
                    env=child_environment(rank, self._num, port, fds[0] if fds else None, token),
                    stdout=None if rank == 0 else subprocess.PIPE, stderr=None if rank == 0 else subprocess.STDOUT,
                    start_new_session=True,  # because: Ctrl-C would reach children twice, from the terminal and from us
                )  # fmt: skip
                self._children.append(child)
                threading.Thread(target=self._report_end, args=(rank,), daemon=True).start()
                if child.stdout is not None:
                    self._speakers.append(threading.Thread(target=self._speak, args=(rank, child.stdout), daemon=True))
                    self._speakers[-1].start()
            os.close(parent_lives)
        for number in self._signals:  # those that came while children were being started
            self._send(number)

    def wait(self) -> Outcome:
        alive, failed, killed = set(range(self._num)), list[int](), set[int]()
        deadline: float | None = None
        while alive:
            try:
                # because: a signal that the system hands to another thread wakes nobody who waits without an end
                left = _LOOK_S if deadline is None else max(0.0, deadline - time.monotonic())
                rank = self._ended.get(timeout=left)
            except queue.Empty:
                if deadline is None:
                    continue
                killed, deadline = set(alive), None
                for rank in killed:
                    with suppress(ProcessLookupError):
                        os.killpg(self._children[rank].pid, signal.SIGKILL)
                continue
            alive.discard(rank)
            if self._children[rank].returncode not in _PEACEFUL and rank not in killed:
                failed.append(rank)
                deadline = deadline or time.monotonic() + self._grace_s
        for speaker in self._speakers:
            speaker.join(timeout=1.0)  # because: a helper of a dead child may hold its output open
        os.close(self._alive_fd)
        return self._outcome(failed, sorted(killed))

    def _outcome(self, failed: list[int], killed: list[int]) -> Outcome:
        if not failed:
            return Outcome(max(child.returncode for child in self._children))
        way_out = "Start the same command again to go on."
        # because: survivors may be quicker to end than the one whose failure they report
        by_itself = [rank for rank in failed if self._children[rank].returncode != PeerLostError.exit_code]
        if killed and not by_itself:
            still = f"{ranks_text(killed)} of {self._num} stood still while the others waited, and had to be killed."
            return Outcome(PeerLostError.exit_code, killed[0], f"{still} {way_out}")
        rank = (by_itself or failed)[0]
        code = self._children[rank].returncode
        if 0 in failed and self._children[0].returncode == code:
            rank = 0  # because: where several end for one reason, rank 0 speaks for all
        if -code in self._signals:
            return Outcome(128 - code, rank, f"{signal.Signals(-code).name} came before the work began.")
        rest = f"; the other {len(killed)} had to be killed" if killed else ""
        if code < 0:
            lost = f"rank {rank} of {self._num} was ended by {signal.Signals(-code).name}, and the run with it{rest}."
            return Outcome(PeerLostError.exit_code, rank, f"{lost} {way_out}")
        cause = f"rank {rank} of {self._num} failed with exit code {code}{rest}: {self._last_words(rank)}"
        return Outcome(code, rank, cause if rank else None)

    def _last_words(self, rank: int) -> str:
        """Its error, or the end of its traceback."""
        lines = [line for line in self._last_lines[rank] if line.strip()]
        errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
        return (errors or lines or ["it said nothing"])[-1]

    @contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if len(self._children) == self._num:
            self._send(number)

    def _send(self, number: int) -> None:
        for child in self._children:
            child.send_signal(number)

    def _report_end(self, rank: int) -> None:
        self._children[rank].wait()
        self._ended.put(rank)

    def _speak(self, rank: int, output: IO[str]) -> None:
        with output:
            for line in output:
                self._last_lines[rank].append(line.rstrip("\n"))
                sys.stderr.write(f"[rank {rank}] {line}")
                sys.stderr.flush()
