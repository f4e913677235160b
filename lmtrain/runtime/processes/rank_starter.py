"""Starts the processes of a launcher: as forks of one server where that is safe, otherwise each by itself. Torch-free.

Called by launch. A server that is lost is replaced; processes that it has forked are the launcher's children and go on.
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
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from lmtrain.runtime.processes.fork_server import MAX_BYTES, ROOM, ROOM_BYTES, Request, fork_problem, main_of_fork
from lmtrain.runtime.processes.process import forks_wanted
from lmtrain.runtime.processes.signals import blocked_stops

_ADOPT_ORPHANS, _ADOPTS_ORPHANS = 36, 37  # PR_SET_CHILD_SUBREAPER and PR_GET_CHILD_SUBREAPER
_LOOK_S = 0.2
_STOPPED_S = 10.0  # that a server may stand still by SIGSTOP before another one takes its place
_MOST_LOST = 3  # servers, after which processes are started without one


@dataclass(frozen=True)
class Program:
    """`python -m MODULE ARGUMENTS`, which all processes of a job run, and what can be done for all of them once."""

    arguments: Sequence[str]
    module: str = "lmtrain.__main__"  # its `main` is called in a fork
    imports: Sequence[str] = ()
    prepare: tuple[str, Mapping[str, Any]] | None = None  # MODULE:FUNCTION and its arguments, called after the imports
    helper: str | None = None  # MODULE:FUNCTION of a process beside each rank that has peers


class ServerLostError(Exception):
    """The server ended or stood still before it answered; the text says how."""


class StartCancelledError(Exception):
    """The launcher was asked to stop while it waited for the server."""


class RankStarter:
    """Starts processes of one program until it is closed. `say` gets what a user should know of the server."""

    def __init__(
        self, program: Program, environment: Mapping[str, str], host: str, *, say: Callable[[str], None],
        explain: Callable[[str], None] = lambda text: None, is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """`environment` is what all processes have in common; `explain` gets why no server is used."""
        self._program, self._environment, self._host = program, dict(environment), host
        self._say, self._explain, self._is_cancelled = say, explain, is_cancelled
        self._server: _Server | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._num_lost = 0
        self._problem = _platform_problem()  # why no server is used
        if self._problem is not None:
            explain(self._problem)

    def open(self) -> None:
        """Wait until processes can be started."""
        while self._problem is None:
            try:
                if self._server is None:
                    self._server = _Server(self._program, self._environment)
                    self._problem = self._server.import_all(self._program, self._is_cancelled)
                else:
                    self._server.check()
                break
            except ServerLostError as error:
                self._replace(str(error))
        if self._problem is not None and self._server is not None:
            self._explain(self._problem)
            self._drop()

    def start(
        self, streams: tuple[int, int, int], environment: Mapping[str, str], *, title: str, name: str,
        keep: tuple[str, int] | None = None, helper: tuple[str, str] | None = None,
        other: tuple[str, Sequence[str]] | None = None, announce: Callable[[int], None] = lambda pid: None,
    ) -> int:  # fmt: skip
        """Start a process and return its id; it begins with signals that ask for a stop blocked.

        `announce` gets the id before a forked process runs anything.
        `keep` is a variable and a descriptor: the variable holds what number the descriptor has in the process.
        `helper` is the title and the name of the program's helper, where the process is to have one.
        `other` is a module and its arguments, to be run in place of the program.
        """
        module, arguments = other or (self._program.module, self._program.arguments)
        self.open()
        while self._server is not None:
            function = self._program.helper
            request = Request(
                module=module, arguments=other and other[1], title=title, name=name, environment=dict(environment),
                helper=(function, *helper) if function and helper else None, keep=keep[0] if keep else None,
            )  # fmt: skip
            try:
                fds = [*streams, *([keep[1]] if keep else [])]
                return self._server.fork(request, fds, self._is_cancelled, announce)
            except ServerLostError as error:
                self._replace(str(error))
                self.open()
        variables = self._environment | dict(environment) | ({keep[0]: str(keep[1])} if keep else {})
        # because: what comes before a process can hear would end it, and waits for it in this way
        with blocked_stops():
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], env=variables, stdin=streams[0], stdout=streams[1],
                stderr=streams[2], pass_fds=[keep[1]] if keep else [], start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        announce(process.pid)
        return process.pid

    def look(self) -> None:
        """Say it if the server was lost while nothing was asked of it."""
        if self._server is not None:
            try:
                self._server.check()
            except ServerLostError as error:
                self._replace(str(error))

    def close_server(self) -> None:
        """End the server, whose forks go on without it; what is started later is started by itself."""
        self._problem = self._problem or "it has forked all ranks"
        self._drop()

    def close(self) -> None:
        self._drop()
        for process in self._processes:
            process.wait()  # because: Popen warns of a process that it has not seen end

    def _replace(self, how: str) -> None:
        self._drop()
        self._num_lost += 1
        server = f"The server of node {self._host}, which forks the ranks, {how}"
        if self._num_lost < _MOST_LOST:
            self._say(f"{server}. Another one starts where it is needed.")
        else:
            self._problem = f"{self._num_lost} servers were lost"
            self._say(f"{server}, as {self._num_lost - 1} did before it. Ranks are started without one.")

    def _drop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            server.close()


class adopting_orphans:  # because: read as a word, `with adopting_orphans():`
    """Context in which this process becomes the parent of whatever its children leave behind. Linux alone."""

    def __enter__(self) -> None:
        self._did_before = _adopts_orphans()
        _prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)

    def __exit__(self, *_: object) -> None:
        _prctl(_ADOPT_ORPHANS, int(self._did_before), 0, 0, 0)


class _Server:
    """The launcher's side of a fork server."""

    def __init__(self, program: Program, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stopped_at: float | None = None
        self._process: subprocess.Popen[bytes] | _Fork
        if _has_all_of(program, environment):
            with theirs, blocked_stops():
                self._process = _Fork(lambda: main_of_fork(theirs, program.arguments, environment))
            return
        # because: forked processes show their own command line and variables where these were
        words = ["lmtrain.runtime.processes.fork_server", str(theirs.fileno()), *program.arguments]
        with theirs, blocked_stops():
            self._process = subprocess.Popen(
                [sys.executable, "-m", *words], env=dict(environment) | {ROOM: " " * ROOM_BYTES},
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
                stdout=subprocess.DEVNULL if sys.__stdout__ is None else None,
                stderr=subprocess.DEVNULL if sys.__stderr__ is None else None,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def import_all(self, program: Program, is_cancelled: Callable[[], bool]) -> str | None:
        """Wait until all is imported; return why the server must not be forked, or None."""
        with os.fdopen(os.memfd_create("lmtrain"), "w") as asked:  # because: settings can be longer than a message
            json.dump({"imports": program.imports, "prepare": program.prepare}, asked)
            asked.flush()
            self._send([b"import"], [asked.fileno()])
        problem: str | None = self._answer(is_cancelled)["problem"]
        return problem

    def fork(
        self, request: Request, fds: Sequence[int], is_cancelled: Callable[[], bool], announce: Callable[[int], None]
    ) -> int:
        """Fork a process, which waits until `announce` has got its id; return the id."""
        gate, opens = os.pipe()
        try:
            try:
                self._send([json.dumps(vars(request)).encode()], [gate, *fds])
            finally:
                os.close(gate)
            answer = self._answer(is_cancelled)
            if answer["pid"] < 0:
                raise OSError(answer["errno"], os.strerror(answer["errno"]))
            announce(answer["pid"])
            with suppress(BrokenPipeError):  # because: a process that was killed is reported as any other
                os.write(opens, b"1")
            return int(answer["pid"])
        finally:
            os.close(opens)  # because: a process that its server forked without being able to say so ends by this

    def check(self) -> None:
        """Raise if it has ended, or has stood still for long."""
        if self._process.poll() is not None:
            raise ServerLostError(_how_ended(self._process.returncode))
        stopped = None
        with suppress(ChildProcessError):  # because: that is how the system tells of one that has just ended
            stopped = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        self._stopped_at = (self._stopped_at or time.monotonic()) if stopped is not None else None
        if self._stopped_at is not None and time.monotonic() - self._stopped_at > _STOPPED_S:
            raise ServerLostError(f"was stopped by a signal and stood still for {_STOPPED_S:.0f} s")

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
            self._process.wait()
            raise ServerLostError(_how_ended(self._process.returncode)) from None

    def _answer(self, is_cancelled: Callable[[], bool]) -> dict[str, Any]:
        while not select.select([self._control], [], [], _LOOK_S)[0]:
            self.check()
            if is_cancelled():
                raise StartCancelledError
        with suppress(ConnectionResetError):
            if data := self._control.recv(MAX_BYTES):
                return dict(json.loads(data))
        self._process.wait()
        raise ServerLostError(_how_ended(self._process.returncode))


class _Fork:
    """A fork of this process, with what is asked of one that is started."""

    def __init__(self, run: Callable[[], NoReturn]) -> None:
        self.returncode = 0
        self._has_ended = False
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # because: what is held back would be written by both
        self.pid = os.fork()
        if self.pid == 0:
            run()

    def poll(self) -> int | None:
        return self.wait(os.WNOHANG)

    def kill(self) -> None:
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, how: int = 0) -> int | None:
        if not self._has_ended and (ended := os.waitpid(self.pid, how))[0]:
            self.returncode, self._has_ended = os.waitstatus_to_exitcode(ended[1]), True
        return self.returncode if self._has_ended else None


def _has_all_of(program: Program, environment: Mapping[str, str]) -> bool:
    """Return whether a fork of this process would be like a server that has imported all that the program needs."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    # because: another program that calls the launcher may have files, locks and exit handlers that no rank should have
    if spec is None or spec.name not in ("lmtrain.__main__", "lmtrain.runtime.processes.fork_server"):
        return False
    if not program.imports or not all(name in sys.modules for name in program.imports) or fork_problem():
        return False
    torch = sys.modules.get("torch")  # which reads its number of threads once
    return torch is None or str(torch.get_num_threads()) == environment.get("OMP_NUM_THREADS")


def _how_ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _platform_problem() -> str | None:
    if not forks_wanted():
        return "LMTRAIN_FORK=0 asks for it"
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} does not let one process adopt what another has forked"
    if not _adopts_orphans():
        return "the system does not let this process adopt what another has forked"
    return None


def _adopts_orphans() -> bool:
    """Return whether this process is the parent of whatever its children leave behind."""
    with suppress(OSError, AttributeError, ImportError):
        import ctypes  # because: most commands start no processes

        answer = ctypes.c_int(0)
        ctypes.CDLL(None).prctl(_ADOPTS_ORPHANS, ctypes.byref(answer), 0, 0, 0)
        return answer.value == 1
    return False


def _prctl(*words: int) -> None:
    with suppress(OSError, AttributeError, ImportError):
        import ctypes  # because: as above

        ctypes.CDLL(None).prctl(*words)
