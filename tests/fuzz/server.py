"""The process that runs the verbs: it has imported everything, forks for each call and says how the child fared.

A child of its own for each call, so that a crash, a hang or eaten memory is a finding and not the end of the fuzzer.
What it asks of the system is seen by an audit hook, which no file can talk its way around.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import platform
import resource
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# what changes a file that it names: event -> positions of the names among its arguments
CHANGES = {
    "os.remove": (0,), "os.rmdir": (0,), "os.mkdir": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,),
    "os.truncate": (0,), "os.chmod": (0,), "os.utime": (0,),
}  # fmt: skip
# what no input may lead to
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "socket.bind",
             "pickle.find_class", "webbrowser.open", "ctypes.dlopen")  # fmt: skip
MOST_BYTES = 6 << 30  # what a call may make in all, so that a finding does not take the machine
HARMLESS = ("/dev/null", "/dev/zero", "/dev/tty", "/dev/shm", "/proc")  # noqa: S108


def import_all() -> None:
    """What the first call would import, so that children share it."""
    for room in ("lmtrain", "data_tools"):
        for module in pkgutil.walk_packages(importlib.import_module(room).__path__, f"{room}."):
            if module.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:  # because: what only an extra brings may be absent
                if (error.name or "").partition(".")[0] in ("lmtrain", "data_tools"):
                    raise
    # because: the first optimizer imports it, and with it come a folder, a file and a question to the system
    importlib.import_module("torch._dynamo")
    with suppress(ImportError):  # because: an export asks it, and it takes seconds
        importlib.import_module("transformers.models.gpt2.modeling_gpt2")
    tempfile.gettempdir()
    platform.processor()


def watch(told: int, writes: Sequence[str], allowed: Sequence[str]) -> None:
    """From here on in this process, each act outside `writes` and each forbidden one is a line in `told`."""
    busy = threading.local()

    def outside(path: object) -> bool:
        if isinstance(path, int) or path is None:
            return False
        real = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        return not any(real == place or real.startswith(place + "/") for place in (*writes, *HARMLESS))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if getattr(busy, "now", False):  # because: looking at a path raises events too
            return
        busy.now = True
        try:
            if event == "open":
                path, mode, flags = arguments
                changes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) or set("wax+") & set(str(mode))
                found = [path] if changes and outside(path) else []
            elif event in CHANGES:
                found = [arguments[place] for place in CHANGES[event] if outside(arguments[place])]
            else:
                found = [arguments] if event in FORBIDDEN and event not in allowed else []
            for one in found:
                os.write(told, f"{event} {str(one)[:300]!a}\n".encode())
        finally:
            busy.now = False

    sys.addaudithook(hook)


def child(request: dict[str, Any], told: int) -> None:
    """Becomes `lmtrain ARGUMENTS`, as a shell would start it."""
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    os.environ.update(request["env"])
    tempfile.tempdir = request["env"].get("TMPDIR", tempfile.tempdir)  # because: it has been asked for by now
    os.chdir(request["folder"])
    watch(told, request["writes"], request["allowed"])
    from lmtrain.cli.main import main  # because: `import_all` is the parent's, and this is where a shell would import

    try:
        main(request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def serve(request: dict[str, Any]) -> dict[str, Any]:
    seen, told = os.pipe()
    before = resident()
    pid = os.fork()
    if not pid:
        os.close(seen)
        child(request, told)
    os.close(told)
    # the pipe ends when the child and all that it started have ended
    lines, until = bytearray(), time.monotonic() + request["seconds"]
    ended = False
    while not ended and (left := until - time.monotonic()) > 0:
        if select.select([seen], [], [], left)[0]:
            new = os.read(seen, 1 << 16)
            lines += new[: max(0, (1 << 16) - len(lines))]
            ended = not new
    os.close(seen)
    finished = ended or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    if not ended:
        os.killpg(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "ended": "" if ended else "left processes behind" if finished else f"not done in {request['seconds']} s",
        "cpu_s": used.ru_utime + used.ru_stime,
        "grown": max(0, used.ru_maxrss * 1024 - before),
        "touched": sorted(set(lines.decode(errors="replace").splitlines()))[:20],
    }


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # because: what an import prints is no answer
    import_all()
    gc.freeze()  # because: a collection in a child would touch, and so copy, every page of what it shares
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
