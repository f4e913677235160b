"""The fork server: it imports once what the ranks of a node need, and forks them. Torch-free.

Started by start_rank_processes.py. It has one thread and opens no device, so that a fork is safe; if its imports have
done either, it reports that and forks nothing. Each message on its socket requests one process, which does what `python
-m MODULE ARGUMENTS` would by calling the module's `main`. A process is forked twice: its parent ends at once and the
launcher adopts it, so that the launcher gets its exit code even if the server is gone.

`ps` shows a forked process with the command line and variables of its parent, since Linux reads both from fixed
addresses in memory. `show_title` and `show_environment` write there; on other systems they do nothing.
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
from typing import Any, NoReturn, TextIO

from lmtrain.runtime.processes.process_environment import COMPANION_VARIABLE, drop_variable, end_now, set_variables

_program: tuple[str, ...] = ()  # the program's arguments, which are on the server's command line too
MAX_MESSAGE_BYTES = 1 << 17
MAX_FDS = 8  # descriptors that come with a message
_CHILD_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
# because: an open descriptor of one of these means that a driver holds state, which a fork would share
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/infiniband", "/dev/accel")
# a variable of so many spaces in the server's environment, whose memory its forks overwrite: see `show_environment`
PLACEHOLDER_VARIABLE = "LMTRAIN_ROOM"
PLACEHOLDER_BYTES = 512
_placeholder_address: int | None = None  # the address of that memory, once it may be overwritten
_shown_variables: dict[str, str] = {}  # the variables that are written there
_ARGUMENTS, _ENVIRONMENT = (45, 46), (47, 48)  # fields of /proc/self/stat after the name: start and end


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to fork a process. Descriptors come with it: the gate, standard input, output and error, then that of
    `keep`.

    The gate is a pipe. The process runs nothing until it reads a byte there, and ends if the pipe closes without one.
    """

    module: str
    arguments: Sequence[str] | None  # None: the program's, from the server's own command line
    title: str  # shown by `ps` as the command line, followed by the server's arguments
    name: str  # the short name
    environment: dict[str, str] = field(default_factory=dict)  # variables in addition to the server's
    # MODULE:FUNCTION that a child of the process runs with a socket, before the process has threads; its title and name
    helper: tuple[str, str, str] | None = None
    keep: str | None = None  # the variable that will hold the number of the fifth descriptor


def main() -> None:
    """Serve requests until the launcher closes its end of the socket; a forked process runs its request and ends."""
    _serve_or_run_fork(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])


def main_of_fork(control: socket.socket, arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run the fork server, which forks the ranks, in a fork of a launcher that has imported everything already.
    `control` is the socket to the launcher, `arguments` are the program's, `environment` holds the variables to set.
    Never returns.

    Descriptors, signal handlers and variables of the launcher are replaced by those of a newly started process.
    """
    try:
        os.setsid()
        _close_inherited_fds(control.fileno())
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        set_variables(environment)
        show_title(" ".join(["lmtrain.runtime.processes.fork_server", *arguments]), "lmtrain server")
        _serve_or_run_fork(control, arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def _close_inherited_fds(kept_fd: int) -> None:
    """Replace every inherited file descriptor by /dev/null, except standard output, standard error and `kept_fd`.

    because: a closed number could be reused, and the launcher's object that holds it could then close another file
    """
    null_fd = os.open(os.devnull, os.O_RDWR)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in (1, 2, kept_fd, null_fd):
            with suppress(OSError):  # because: the descriptor of the listing itself is closed by now
                os.fstat(fd)
                os.dup2(null_fd, fd, inheritable=fd == 0)


def _serve_or_run_fork(control: socket.socket, arguments: Sequence[str]) -> None:
    global _program
    _program = tuple(arguments)
    # because: the closed socket reports the launcher's end too, but not to a process that is stopped
    prctl(_CHILD_DIES_WITH_PARENT, signal.SIGKILL)
    run = None
    with suppress(BrokenPipeError, ConnectionResetError):  # because: the launcher has ended, and so does this process
        run = serve(control)
    if run is not None:
        run_and_end(run)


def prctl(option: int, argument: Any) -> None:
    """Set or read a property of this process with Linux's prctl; do nothing on other systems."""
    with suppress(OSError, AttributeError, ImportError):
        import ctypes  # because: it is slow to import, and most commands start no processes

        ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def serve(control: socket.socket) -> Callable[[], None] | None:
    """Serve the launcher at the socket `control`: import the modules that its first message names, report whether
    forking is safe, and fork a process for each further message. Return None in the server once the launcher has ended;
    return in a forked process the function that it must run.
    """
    gc.disable()  # because: repeated collections during the imports take a tenth of a second and find nothing
    _, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 1)
    if not fds:
        return None  # because: the launcher has ended
    with os.fdopen(fds[0]) as file:
        file.seek(0)
        preparation = json.load(file)
    problem = import_all(preparation.get("imports", ()))
    if problem is None and preparation.get("prepare") is not None:
        function, arguments = preparation["prepare"]
        with suppress(Exception):  # because: each rank meets the same error by itself, and reports it
            _load_function(function)(**arguments)
    problem = problem or fork_problem()
    control.send(json.dumps({"problem": problem}).encode())
    gc.freeze()  # because: a collection in a forked process would write to every shared page
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, MAX_FDS)
        if not data:
            return None
        pid, error_number = fork_for_launcher()
        if pid == 0:
            control.close()
            request = Request(**json.loads(data))
            return lambda: run_request(request, fds)
        for fd in fds:
            os.close(fd)
        control.send(json.dumps({"pid": pid, "errno": error_number}).encode())


def import_all(modules: Sequence[str]) -> str | None:
    """Import the modules in order. Return a message about the first that cannot be imported or starts threads; None if
    there is none.
    """
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
    """Return why forking this process into ranks fails or is unsafe (threads, an open device, initialized CUDA); None
    if it is safe.
    """
    if (count := num_threads()) > 1:
        return f"{count - 1} other thread{'s run' if count > 2 else ' runs'} in it, which a fork would lose"
    if device := _open_device():
        return f"{device} is open in it, which a fork would share"
    try:
        if _forks_lose_cuda():
            return "CUDA was initialized in it, after which a fork cannot use CUDA"
    except OSError as error:
        return f"it cannot be forked ({error.strerror})"
    return None


def num_threads() -> int:
    """Return how many threads this process has, including those of libraries; 1 if the system does not tell."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _open_device() -> str | None:
    """Return the path of a GPU or network device file that this process has open, or None."""
    with suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if target.startswith(_DEVICES):
                    return target
    return None


def _forks_lose_cuda() -> bool:
    """Return whether torch would refuse to use CUDA in a fork of this process. If needed, a fork is made to find out.
    """
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
    """Fork a process that becomes a child of the launcher. Return (process id, 0) in the server, (0, 0) in the forked
    process, or (-1, errno) if forking fails.
    """
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb", buffering=0) as reader, os.fdopen(write_fd, "wb", buffering=0) as writer:
        try:
            middle_pid = os.fork()
        except OSError as error:
            return -1, error.errno or errno.EAGAIN
        if middle_pid == 0:
            try:
                pid = os.fork()
            except OSError as error:
                writer.write(json.dumps([-1, error.errno]).encode())
                os._exit(0)
            if pid > 0:
                os._exit(0)
            os.setsid()  # because: Ctrl-C would reach it twice, from the terminal and from the launcher
            writer.write(json.dumps([os.getpid(), 0]).encode())
            return 0, 0
        writer.close()
        os.waitpid(middle_pid, 0)  # because: only after its parent's end is the process a child of the launcher
        answer = reader.read(4096)
    if not answer:
        return -1, errno.EAGAIN  # the process in the middle was killed
    pid, error_number = json.loads(answer)
    return pid, error_number


def run_request(request: Request, fds: Sequence[int]) -> None:
    """Run the requested module's `main` in this forked process, with streams, variables and arguments as in a new
    process. `fds` are the descriptors that came with the request: a pipe on which to wait for the start, the three
    standard streams, and perhaps a descriptor to keep.
    """
    gate_fd, stream_fds, extra_fds = fds[0], fds[1:4], fds[4:]
    if not os.read(gate_fd, 1):
        os._exit(0)  # because: the launcher did not get this process's id, and starts another process instead
    os.close(gate_fd)
    for number, fd in enumerate(stream_fds):
        os.dup2(fd, number)
        os.close(fd)
    variables = dict(request.environment)
    if request.keep is not None:
        os.set_inheritable(extra_fds[0], True)
        variables[request.keep] = str(extra_fds[0])
    set_variables(variables)
    show_title(_full_title(request.title), request.name)
    if request.helper is not None:
        with suppress(OSError):  # because: a process without its helper starts one by itself, or reports why it cannot
            set_variables({COMPANION_VARIABLE: _fork_helper(*request.helper, unused_fds=extra_fds)})
    show_environment(variables)
    gc.enable()
    # because: a new process has random states of its own, so a fork must too; Python's own module does that itself
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    sys.stdout = _open_stream(1, sys.stdout, line_buffering=os.isatty(1))
    sys.stderr = _open_stream(2, sys.stderr, line_buffering=True)
    path = importlib.import_module(request.module).__file__ or request.module
    sys.argv = [path, *(_program if request.arguments is None else request.arguments)]
    _load_function(f"{request.module}:main")()


def _load_function(path: str) -> Callable[..., None]:
    """Return the function that "MODULE:FUNCTION" names, importing the module."""
    module, _, name = path.partition(":")
    function: Callable[..., None] = getattr(importlib.import_module(module), name)
    return function


def _open_stream(number: int, template: TextIO, *, line_buffering: bool) -> io.TextIOWrapper:
    """Open standard output or error (`number` 1 or 2) as Python does when it starts, with the encoding and the name of
    `template`, which is the server's own stream.

    because: the server's stream has cached what it is connected to. With PYTHONUNBUFFERED nothing is buffered.
    """
    unbuffered, file = bool(getattr(template, "write_through", False)), io.FileIO(number, "wb", closefd=False)
    file.name = template.name
    return io.TextIOWrapper(
        file if unbuffered else io.BufferedWriter(file),
        encoding=template.encoding, errors=template.errors, newline="\n",
        line_buffering=line_buffering and not unbuffered, write_through=unbuffered,
    )  # fmt: skip


def _full_title(title: str) -> str:
    """Return the command line to show: the title and the program's arguments."""
    return " ".join([f"lmtrain {title}:", *_program])


def run_and_end(run: Callable[[], None]) -> NoReturn:
    """Call `run`, then end this process as Python would, with exit handlers and exit code, but without freeing its
    memory.

    because: freeing it would write to all memory shared with the server, and so copy every page
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


def _fork_helper(function: str, title: str, name: str, *, unused_fds: Sequence[int]) -> str:
    """Fork a helper process that calls `function` ("MODULE:FUNCTION") with an end of a new socket pair. Return
    "DESCRIPTOR:PID": this process's end of the pair and the helper's process id. `title` and `name` are what `ps` shows
    of the helper, which closes `unused_fds`.
    """
    own_end, helper_end = socket.socketpair()
    with own_end, helper_end:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                own_end.close()
                for fd in unused_fds:
                    os.close(fd)
                show_title(_full_title(title), name)
                _load_function(function)(helper_end)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        return f"{own_end.detach()}:{pid}"


def show_title(title: str, name: str) -> None:
    """Make `ps` show `title` as this process's command line and `name`, cut to 15 bytes, as its short name."""
    with suppress(OSError):
        Path("/proc/self/comm").write_bytes(name.encode()[:15])
    start, end = _memory_range(_ARGUMENTS)
    if end > start:
        text = title.encode(errors="surrogateescape")[: end - start - 1]
        _write_memory(start, text.ljust(end - start, b"\0"))


def show_environment(variables: Mapping[str, str]) -> None:
    """Make /proc/PID/environ of this process show `variables`. They overwrite a placeholder variable in the memory that
    this process has inherited; if there is none, or it is too small, nothing is shown.

    os.environ, which the process itself reads, is not changed, except that the placeholder is removed. A fork of a fork
    shows the variables of its parent, too.
    """
    global _placeholder_address
    if drop_variable(PLACEHOLDER_VARIABLE):  # from here on nothing reads the memory that it occupies
        import ctypes  # because: only a forked process needs it, and this file is imported by each launcher

        start, end = _memory_range(_ENVIRONMENT)
        offset = ctypes.string_at(start, end - start).find(f"\0{PLACEHOLDER_VARIABLE}=".encode()) if end > start else -1
        _placeholder_address = start + offset + 1 if offset >= 0 else None
    _shown_variables.update(variables)
    size = len(PLACEHOLDER_VARIABLE) + 1 + PLACEHOLDER_BYTES
    text = b"\0".join(f"{name}={value}".encode(errors="surrogateescape") for name, value in _shown_variables.items())
    if _placeholder_address is not None and len(text) <= size:
        _write_memory(_placeholder_address, text.ljust(size, b"\0"))


def _memory_range(fields: tuple[int, int]) -> tuple[int, int]:
    """Return the start and end address of this process's command line or environment in memory; (0, 0) if unknown.
    `fields` are the positions of the two addresses in /proc/self/stat, counted after the process name.
    """
    try:
        words = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        return int(words[fields[0]]), int(words[fields[1]])
    except (OSError, ValueError, IndexError):
        return 0, 0


def _write_memory(start: int, data: bytes) -> None:
    """Copy `data` to the address `start` of this process's memory."""
    import ctypes  # because: as above

    ctypes.memmove(start, data, len(data))


if __name__ == "__main__":
    main()
