"""Start the ranks of a launcher: as forks of one server if that is safe, otherwise each as a new process. Torch-free.

Called by local_rank_launcher.py; the watchdog uses `ForkedProcess` for its companion. A server that is lost is
replaced; the ranks that it has forked are the launcher's children and go on.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from lmtrain.runtime.processes.fork_server import (
    MAX_MESSAGE_BYTES,
    PLACEHOLDER_BYTES,
    PLACEHOLDER_VARIABLE,
    Request,
    fork_problem,
    main_of_fork,
    prctl,
)
from lmtrain.runtime.processes.process_environment import ProcessEnv, may_fork_ranks
from lmtrain.runtime.processes.stop_signals import blocked_stops

_ADOPT_ORPHANS, _ADOPTS_ORPHANS = 36, 37  # PR_SET_CHILD_SUBREAPER and PR_GET_CHILD_SUBREAPER
_POLL_S = 0.2
_WAIT_POLL_S = 0.005
_MAX_STOPPED_S = 10.0  # how long a server may be stopped by SIGSTOP before it is replaced
_MAX_LOST_SERVERS = 3  # after so many, ranks are started without a server


@dataclass(frozen=True)
class Program:
    """The command that all ranks of a job run, `python -m MODULE ARGUMENTS`, and what a fork server does before it
    forks them.
    """

    arguments: Sequence[str]
    module: str = "lmtrain.__main__"  # its `main` is called in a fork
    imports: Sequence[str] = ()  # modules that the server imports
    prepare: tuple[str, Mapping[str, Any]] | None = None  # MODULE:FUNCTION and its arguments, called after the imports
    helper: str | None = None  # MODULE:FUNCTION of a companion process for each rank that has peers


class ServerLostError(Exception):
    """Raised if the server ended or hung before it answered; the text says how, as a clause."""


class StartCancelledError(Exception):
    """Raised if the launcher received a stop signal while it waited for the server."""


class RankStarter:
    """Starts processes of one program, by a fork server if possible, until it is closed."""

    def __init__(
        self, program: Program, environment: Mapping[str, str], host: str, *, report: Callable[[str], None],
        explain_no_server: Callable[[str], None] = lambda text: None, is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Callbacks: `report` gets messages for the user about lost servers, `explain_no_server` why none is used.

        `environment` holds the variables of all processes, `host` is the node's name for messages; `is_cancelled`
        returns True once the launcher is to stop.
        """
        self._program, self._environment, self._host = program, dict(environment), host
        self._report, self._explain_no_server, self._is_cancelled = report, explain_no_server, is_cancelled
        self._server: _Server | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._num_lost_servers = 0
        self._no_server_reason = _platform_problem()  # None if a server is used
        if self._no_server_reason is not None:
            explain_no_server(self._no_server_reason)

    def open(self) -> None:
        """Start the fork server if none runs, and wait until it has imported the program's modules. If it cannot be
        used, explain why and end it: `start` then starts processes without a server.
        """
        while self._no_server_reason is None:
            try:
                if self._server is None:
                    self._server = _Server(self._program, self._environment)
                    self._no_server_reason = self._server.import_all(self._program, self._is_cancelled)
                else:
                    self._server.check()
                break
            except ServerLostError as error:
                self._handle_lost_server(str(error))
        if self._no_server_reason is not None and self._server is not None:
            self._explain_no_server(self._no_server_reason)
            self._drop_server()

    def start(
        self, streams: tuple[int, int, int], environment: Mapping[str, str], *, title: str, name: str,
        keep: tuple[str, int] | None = None, helper: tuple[str, str] | None = None,
        other_module: tuple[str, Sequence[str]] | None = None, announce: Callable[[int], None] = lambda pid: None,
    ) -> int:  # fmt: skip
        """Start a process that runs the program, or `other_module` (a module and its arguments), and return its process
        id. Stop signals are blocked in it at first. `streams` are the descriptors of its standard input, output and
        error, `environment` its own variables, `title` and `name` what `ps` shows. `keep` (variable, descriptor) is a
        descriptor that it inherits and a variable for its number; `helper` (title, name) gives it the program's helper.
        `announce` gets the process id before a forked process runs anything.
        """
        module, arguments = other_module or (self._program.module, self._program.arguments)
        self.open()
        while self._server is not None:
            function = self._program.helper
            request = Request(
                module=module, arguments=other_module and other_module[1], title=title, name=name,
                environment=dict(environment),
                helper=(function, *helper) if function and helper else None, keep=keep[0] if keep else None,
            )  # fmt: skip
            try:
                fds = [*streams, *([keep[1]] if keep else [])]
                return self._server.fork(request, fds, self._is_cancelled, announce)
            except ServerLostError as error:
                self._handle_lost_server(str(error))
                self.open()
        variables = self._environment | dict(environment) | ({keep[0]: str(keep[1])} if keep else {})
        # because: a stop signal before the process can handle it would kill it; blocked, the signal stays pending
        with blocked_stops():
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], env=variables, stdin=streams[0], stdout=streams[1],
                stderr=streams[2], pass_fds=[keep[1]] if keep else [], start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        announce(process.pid)
        return process.pid

    def check_server(self) -> None:
        """Check the fork server, if one runs: if it has ended or hangs, drop it and report that to the user."""
        if self._server is not None:
            try:
                self._server.check()
            except ServerLostError as error:
                self._handle_lost_server(str(error))

    def close_server(self) -> None:
        """End the server, whose forks go on without it; later processes are started without a server."""
        self._no_server_reason = self._no_server_reason or "it has forked all ranks"
        self._drop_server()

    def close(self) -> None:
        """End the fork server, and wait for the processes that were started without it."""
        self._drop_server()
        for process in self._processes:
            process.wait()  # because: Popen warns if it is dropped before its process was waited for

    def _handle_lost_server(self, loss: str) -> None:
        self._drop_server()
        self._num_lost_servers += 1
        if self._num_lost_servers < _MAX_LOST_SERVERS:
            self._report(f"On node {self._host}, {loss}. A new server starts when it is needed.")
        else:
            self._no_server_reason = f"{self._num_lost_servers} servers were lost"
            self._report(
                f"On node {self._host}, {loss}, after {self._num_lost_servers - 1} others were lost. Ranks are now "
                "started without a server."
            )

    def _drop_server(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            server.close()


def describe_rank_start(imports: Sequence[str]) -> str:
    """Return in words how a job whose ranks import these modules would start them on this machine: forked from one
    server process, or each as a new process, with the reason. To find out, start such a server and stop it again.
    """
    reasons: list[str] = []
    starter = RankStarter(
        Program([], imports=imports), ProcessEnv().shared_environment(), ProcessEnv.detect().host,
        report=reasons.append, explain_no_server=reasons.append,
    )  # fmt: skip
    with closing(starter):
        starter.open()
    if not reasons:
        return "forked from one process, which imports for all of them"
    return f"each started by itself ({'; '.join(reasons)})"


class OrphanAdoption:
    """Context in which this process becomes the parent of processes that its children leave behind (Linux only)."""

    def __enter__(self) -> None:
        self._was_adopting = _adopts_orphans()
        prctl(_ADOPT_ORPHANS, 1)

    def __exit__(self, *_: object) -> None:
        prctl(_ADOPT_ORPHANS, int(self._was_adopting))


class _Server:
    """A running fork server, and the launcher's end of the socket to it."""

    def __init__(self, program: Program, environment: Mapping[str, str]) -> None:
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stopped_at: float | None = None
        self._process: subprocess.Popen[bytes] | ForkedProcess
        if _can_fork_itself(program, environment):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # because: buffered output would be written by both processes
            with server_end, blocked_stops():
                pid = os.fork()
                if pid == 0:
                    main_of_fork(server_end, program.arguments, environment)
            self._process = ForkedProcess(pid)
            return
        # because: a forked process can show its own command line and variables only in the memory that these occupy
        arguments = ["lmtrain.runtime.processes.fork_server", str(server_end.fileno()), *program.arguments]
        with server_end, blocked_stops():
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env=dict(environment) | {PLACEHOLDER_VARIABLE: " " * PLACEHOLDER_BYTES},
                stdin=subprocess.DEVNULL, pass_fds=[server_end.fileno()], start_new_session=True,
                stdout=subprocess.DEVNULL if sys.__stdout__ is None else None,
                stderr=subprocess.DEVNULL if sys.__stderr__ is None else None,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def import_all(self, program: Program, is_cancelled: Callable[[], bool]) -> str | None:
        """Make the fork server import the program's modules, and wait until it has. Return None, or why it is unsafe to
        fork ranks from it. Raise StartCancelledError once `is_cancelled` returns True.
        """
        # because: a file, since settings can be longer than a message
        with os.fdopen(os.memfd_create("lmtrain"), "w") as request_file:
            json.dump({"imports": program.imports, "prepare": program.prepare}, request_file)
            request_file.flush()
            self._send([b"import"], [request_file.fileno()])
        problem: str | None = self._receive_answer(is_cancelled)["problem"]
        return problem

    def fork(
        self, request: Request, fds: Sequence[int], is_cancelled: Callable[[], bool], announce: Callable[[int], None]
    ) -> int:
        """Make the fork server fork a process, and return its process id. `fds` are the descriptors that the process
        gets: its standard streams, and perhaps one to keep. It runs nothing until `announce` was called with its id.
        Raise StartCancelledError once `is_cancelled` returns True.
        """
        gate_read_fd, gate_write_fd = os.pipe()
        try:
            try:
                self._send([json.dumps(vars(request)).encode()], [gate_read_fd, *fds])
            finally:
                os.close(gate_read_fd)
            answer = self._receive_answer(is_cancelled)
            if answer["pid"] < 0:
                raise OSError(answer["errno"], os.strerror(answer["errno"]))
            announce(answer["pid"])
            with suppress(BrokenPipeError):  # because: a process that was killed is reported like any other
                os.write(gate_write_fd, b"1")
            return int(answer["pid"])
        finally:
            os.close(gate_write_fd)  # because: this also ends a process that was forked but never reported

    def check(self) -> None:
        """Raise ServerLostError if the fork server has ended, or was stopped by a signal for longer than
        _MAX_STOPPED_S.
        """
        if self._process.poll() is not None:
            raise self._lost_error()
        is_stopped = is_in_state(os.WSTOPPED, self.pid)
        self._stopped_at = (self._stopped_at or time.monotonic()) if is_stopped else None
        if self._stopped_at is not None and time.monotonic() - self._stopped_at > _MAX_STOPPED_S:
            raise ServerLostError(f"the server that forks the ranks was stopped by a signal for {_MAX_STOPPED_S:.0f} s")

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _send(self, message: Sequence[bytes], fds: Sequence[int]) -> None:
        try:
            socket.send_fds(self._control, message, list(fds))
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                raise
            raise self._lost_error() from None

    def _receive_answer(self, is_cancelled: Callable[[], bool]) -> dict[str, Any]:
        while not select.select([self._control], [], [], _POLL_S)[0]:
            self.check()
            if is_cancelled():
                raise StartCancelledError
        with suppress(ConnectionResetError):
            if data := self._control.recv(MAX_MESSAGE_BYTES):
                return dict(json.loads(data))
        raise self._lost_error()

    def _lost_error(self) -> ServerLostError:
        """Wait until the fork server's process has ended, and return an error that says how it ended."""
        code = self._process.wait()
        end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ServerLostError(f"the server that forks the ranks {end}")


class ForkedProcess:
    """A process that was forked by this one, with the methods of `subprocess.Popen` that its users need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exit_code: int | None = None  # None until this process has reaped it

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its exit code. Raise subprocess.TimeoutExpired after `timeout`
        seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._reap(0 if deadline is None else os.WNOHANG)) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_WAIT_POLL_S)
        return code

    def kill(self) -> None:
        if self._exit_code is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self._exit_code is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # because: the system may have reaped it
                pid, status = self.pid, 0
            self._exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self._exit_code


def is_in_state(state: int, pid: int) -> bool:
    """Return whether the child process `pid` is in `state`: os.WEXITED (it has ended) or os.WSTOPPED (SIGSTOP stopped
    it).

    A child that has ended is not reaped: its exit code can still be read.
    """
    try:
        return os.waitid(os.P_PID, pid, state | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return state == os.WEXITED  # because: the system raises it for a child that has just ended


def _can_fork_itself(program: Program, environment: Mapping[str, str]) -> bool:
    """Return whether a fork of this process can be the fork server: it is an lmtrain command, can be forked safely, has
    imported all modules of the program and uses as many threads as `environment` gives the ranks.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    # because: another program that calls the launcher may have files, locks and exit handlers that no rank should have
    if spec is None or spec.name not in ("lmtrain.__main__", "lmtrain.runtime.processes.fork_server"):
        return False
    if not program.imports or not all(name in sys.modules for name in program.imports) or fork_problem():
        return False
    torch = sys.modules.get("torch")  # because: it reads its number of threads only once
    return torch is None or str(torch.get_num_threads()) == environment.get("OMP_NUM_THREADS")


def _platform_problem() -> str | None:
    """Return why ranks must not be forked from a fork server, because this system cannot or the user does not want it.
    Return None if they may.
    """
    if not may_fork_ranks():
        return "LMTRAIN_FORK=0 asks for it"
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} does not let one process adopt what another has forked"
    return None if _adopts_orphans() else "the system does not let this process adopt what another has forked"


def _adopts_orphans() -> bool:
    """Return whether this process becomes the parent of processes that its children leave behind when they end (a Linux
    subreaper).
    """
    with suppress(ImportError):
        import ctypes  # because: most commands start no processes

        answer = ctypes.c_int(0)
        prctl(_ADOPTS_ORPHANS, ctypes.byref(answer))
        return answer.value == 1
    return False
