"""A process that imports what the ranks of a node need once, and forks them. Started by rank_starter. Torch-free.

It has one thread and touches no device, so that a fork is safe; where its imports have done either, it says so and
forks nothing. Each message on its socket asks for one process, which does what `python -m MODULE ARGUMENTS` would by
calling `main` of the module. It is forked twice: its parent ends at once and the launcher adopts it, so that this one
learns how it ends even when the server is gone.

A forked process shows the words and the variables with which its parent was started, since Linux reads both from where
they lay in memory at that time. `show_title` and `show_environment` write there; on other systems they do nothing.
"""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import io
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TextIO

from lmtrain.runtime.processes.process import COMPANION, drop_variable, end_now, set_variables

_program: tuple[str, ...] = ()  # the arguments of the program, with which the server was started too
MAX_BYTES = 1 << 17  # of a message
MOST_FDS = 8  # with a message
_CHILD_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
# because: an open descriptor of one of these means that a driver has state which a fork would share
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/infiniband", "/dev/accel")
# a variable with which a process is started whose forks are to show variables of their own; see `show_environment`
ROOM = "LMTRAIN_ROOM"
ROOM_BYTES = 512
_room: int | None = None  # where it lies in memory, once nothing else is there
_shown: dict[str, str] = {}  # what stands there
_ARGUMENTS, _ENVIRONMENT = (45, 46), (47, 48)  # fields of /proc/self/stat behind the name: start and end


@dataclass(frozen=True, kw_only=True)
class Request:
    """A process to fork. Descriptors come beside the message: the gate, standard input, output and error, then `keep`.

    The gate is a pipe. The process runs nothing until it reads a byte there, and ends if the pipe closes without one.
    """

    module: str
    arguments: Sequence[str] | None  # None: those that the server was started with, behind the number of its socket
    title: str  # `ps` shows it as its command line, with the server's arguments behind it
    name: str  # its short name
    environment: dict[str, str] = field(default_factory=dict)  # what it has beside the server's
    # MODULE:FUNCTION that a child of the process runs with a socket, before the process has threads; its title and name
    helper: tuple[str, str, str] | None = None
    keep: str | None = None  # a variable that is to hold the number of the fifth descriptor


def main() -> None:
    """Serve until the launcher closes its end. In a forked process: become what was asked for, and end with it."""
    _serve_or_become(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])


def main_of_fork(control: socket.socket, arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Do the same in a fork of a launcher that has imported everything itself, as if this process had been started."""
    try:
        os.setsid()
        _give_up_files(control.fileno())
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        set_variables(environment)
        show_title(" ".join(["lmtrain.runtime.processes.fork_server", *arguments]), "lmtrain server")
        _serve_or_become(control, arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def _give_up_files(but: int) -> None:
    """Point all descriptors but the outputs at nothing: they close, and no object that holds one closes another's."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in (1, 2, but, nowhere):
            with suppress(OSError):  # because: that of the list is closed by now
                os.fstat(fd)
                os.dup2(nowhere, fd, inheritable=fd == 0)


def _serve_or_become(control: socket.socket, arguments: Sequence[str]) -> None:
    global _program
    _program = tuple(arguments)
    # because: the socket tells this process of its launcher's end too, but not while it is stopped
    with suppress(OSError, AttributeError, ImportError):
        import ctypes  # because: it is slow to import, and the ranks import it anyway

        ctypes.CDLL(None).prctl(_CHILD_DIES_WITH_PARENT, signal.SIGKILL)
    forked = None
    with suppress(BrokenPipeError, ConnectionResetError):  # because: the launcher has ended, and so does this process
        forked = serve(control)
    if forked is not None:
        end_with(forked)


def serve(control: socket.socket) -> Callable[[], None] | None:
    """Import, report, and fork for each message. Returns in the server None, in a forked process what it runs."""
    gc.disable()  # because: looking over and over at what is imported takes a tenth of a second and finds nothing
    _, fds, _, _ = socket.recv_fds(control, MAX_BYTES, 1)
    if not fds:
        return None  # because: the launcher has ended
    with os.fdopen(fds[0]) as file:
        file.seek(0)
        asked = json.load(file)
    problem = import_all(asked.get("imports", ()))
    if problem is None and asked.get("prepare") is not None:
        function, arguments = asked["prepare"]
        with suppress(Exception):  # because: what is wrong each rank finds out by itself, and says
            _found(function)(**arguments)
    problem = problem or fork_problem()
    control.send(json.dumps({"problem": problem}).encode())
    gc.freeze()  # because: a collection in a forked process would write to each page that it shares
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_BYTES, MOST_FDS)
        if not data:
            return None
        pid, failed = fork_for_launcher()
        if pid == 0:
            control.close()
            request = Request(**json.loads(data))
            return lambda: become(request, fds)
        for fd in fds:
            os.close(fd)
        control.send(json.dumps({"pid": pid, "errno": failed}).encode())


def import_all(modules: Sequence[str]) -> str | None:
    """Import them; return which one failed or left threads running, or None."""
    for module in modules:
        before = num_threads()
        try:
            importlib.import_module(module)
        except Exception as error:
            return f"{module} could not be imported ({type(error).__name__}: {error})"
        if (started := num_threads() - before) > 0:
            return f"importing {module} started {started} thread{'s' * (started > 1)}, which a fork would lose"
    return None


def fork_problem() -> str | None:
    """Return why this process must not be forked into ranks, or None."""
    if (count := num_threads()) > 1:
        return f"{count - 1} other thread{'s run' if count > 2 else ' runs'} in it, which a fork would lose"
    if device := _open_device():
        return f"{device} is open in it, which a fork would share"
    try:
        if _poisons_children():
            return "CUDA was asked something in it, after which a fork cannot use CUDA"
    except OSError as error:
        return f"it cannot be forked ({error.strerror})"
    return None


def num_threads() -> int:
    """Return how many threads this process has, those of libraries included; 1 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _open_device() -> str | None:
    with suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if target.startswith(_DEVICES):
                    return target
    return None


def _poisons_children() -> bool:
    """Return whether torch would refuse CUDA in a fork of this process, by asking a fork."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None:
        return False
    if cuda.is_initialized():
        return True
    pid = os.fork()
    if pid == 0:
        os._exit(int(bool(getattr(cuda, "_is_in_bad_fork", lambda: False)())))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def fork_for_launcher() -> tuple[int, int]:
    """Fork a process that the launcher adopts; return (its process id, 0), (0, 0) within it, or (-1, errno)."""
    read, write = os.pipe()
    try:
        between = os.fork()
    except OSError as error:
        os.close(read)
        os.close(write)
        return -1, error.errno or errno.EAGAIN
    if between == 0:
        try:
            pid = os.fork()
        except OSError as error:
            os.write(write, json.dumps([-1, error.errno]).encode())
            os._exit(0)
        if pid > 0:
            os._exit(0)
        os.setsid()  # because: Ctrl-C would reach it twice, from the terminal and from the launcher
        os.write(write, json.dumps([os.getpid(), 0]).encode())
        os.close(read)
        os.close(write)
        return 0, 0
    os.close(write)
    os.waitpid(between, 0)  # because: only then is the process the launcher's
    answer = os.read(read, 4096)
    os.close(read)
    if not answer:
        return -1, errno.EAGAIN  # it was killed
    pid, failed = json.loads(answer)
    return pid, failed


def become(request: Request, fds: Sequence[int]) -> None:
    """Run a module's `main` with its own streams, variables and arguments, as in a process that was started for it."""
    gate, streams, kept = fds[0], fds[1:4], fds[4:]
    if not os.read(gate, 1):
        os._exit(0)  # because: the launcher does not know of this process, and starts another one in its place
    os.close(gate)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    variables = dict(request.environment)
    if request.keep is not None:
        os.set_inheritable(kept[0], True)
        variables[request.keep] = str(kept[0])
    set_variables(variables)
    show_title(_with_arguments(request.title), request.name)
    if request.helper is not None:
        with suppress(OSError):  # because: a process without its helper starts one by itself, or says why it cannot
            set_variables({COMPANION: _fork_helper(*request.helper, keep=kept)})
    show_environment(variables)
    gc.enable()
    # because: a fork has random states of its own, as a process has at its start; Python's own module does so itself
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    sys.stdout = _stream(1, sys.stdout, line_buffering=os.isatty(1))
    sys.stderr = _stream(2, sys.stderr, line_buffering=True)
    path = importlib.import_module(request.module).__file__ or request.module
    sys.argv = [path, *(_program if request.arguments is None else request.arguments)]
    _found(f"{request.module}:main")()


def _found(function: str) -> Callable[..., None]:
    """Return what MODULE:FUNCTION names."""
    module, _, name = function.partition(":")
    found: Callable[..., None] = getattr(importlib.import_module(module), name)
    return found


def _stream(number: int, like: TextIO, *, line_buffering: bool) -> io.TextIOWrapper:
    """Open a standard stream as Python does at its start; the server's has learnt what it was connected to.

    With PYTHONUNBUFFERED neither text nor bytes are held back.
    """
    unbuffered, file = bool(getattr(like, "write_through", False)), io.FileIO(number, "wb", closefd=False)
    file.name = like.name
    return io.TextIOWrapper(
        file if unbuffered else io.BufferedWriter(file), encoding=like.encoding, errors=like.errors, newline="\n",
        line_buffering=line_buffering and not unbuffered, write_through=unbuffered,
    )  # fmt: skip


def _with_arguments(title: str) -> str:
    return " ".join([f"lmtrain {title}:", *_program])


def end_with(run: Callable[[], None]) -> NoReturn:
    """Run it, then end this process as Python does, but for tearing down its memory.

    because: that would write to all memory that is shared with the server, and copy each page of it to free it
    """
    code = 1
    try:
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    end_now(code)


def _fork_helper(function: str, title: str, name: str, *, keep: Sequence[int]) -> str:
    """Fork a helper of this process, joined to it by a socket; returns the socket's descriptor and the helper's id."""
    ours, theirs = socket.socketpair()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        code = 1
        try:
            ours.close()
            for fd in keep:
                os.close(fd)
            show_title(_with_arguments(title), name)
            _found(function)(theirs)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    theirs.close()
    return f"{ours.detach()}:{pid}"


def show_title(title: str, name: str) -> None:
    """Make `title` this process' command line and `name` its short name, of which Linux keeps 15 bytes."""
    with suppress(OSError):
        Path("/proc/self/comm").write_bytes(name.encode()[:15])
    start, end = _area(_ARGUMENTS)
    if end > start:
        text = title.encode(errors="surrogateescape")[: end - start - 1]
        _write(start, text.ljust(end - start, b"\0"))


def show_environment(variables: Mapping[str, str]) -> None:
    """Let /proc/PID/environ show these variables, where this process has inherited room for them.

    What the process itself reads is os.environ, which this leaves alone but for removing ROOM. A fork of a fork shows
    what its parent was given, too.
    """
    global _room
    if drop_variable(ROOM):  # from here on nothing reads the memory in which it was
        import ctypes  # because: only a forked process needs it, and this file is imported by each launcher

        start, end = _area(_ENVIRONMENT)
        held = ctypes.string_at(start, end - start).find(f"\0{ROOM}=".encode()) if end > start else -1
        _room = start + held + 1 if held >= 0 else None
    _shown.update(variables)
    size = len(ROOM) + 1 + ROOM_BYTES
    text = b"\0".join(f"{name}={value}".encode(errors="surrogateescape") for name, value in _shown.items())
    if _room is not None and len(text) <= size:
        _write(_room, text.ljust(size, b"\0"))


def _area(fields: tuple[int, int]) -> tuple[int, int]:
    """Return where such an area begins and ends in this process' memory; (0, 0) where the system does not say."""
    try:
        words = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        return int(words[fields[0]]), int(words[fields[1]])
    except (OSError, ValueError, IndexError):
        return 0, 0


def _write(start: int, data: bytes) -> None:
    import ctypes  # because: as above

    ctypes.memmove(start, data, len(data))


if __name__ == "__main__":
    main()
