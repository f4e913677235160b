"""The server that forks ranks: what it refuses to fork, and that a fork is like a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from lmtrain.runtime.processes import fork_server
from tests.marks import wide
from tests.unit.runtime.starting import MODULE, Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# whether a process is a fork of a server, whose module is the main one in it
IS_FORK = "import sys\nprint('lmtrain.runtime.processes.fork_server' in sys.orig_argv)"


@pytest.mark.parametrize(
    ("imported", "explained"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
         "importing imported_first started 1 thread, which a fork would lose"),
        ("raise RuntimeError('no such device')", "imported_first could not be imported (RuntimeError: no such device)"),
        ("import sys\nsys.modules['__main__']._DEVICES = ('/dev/full',)\nfile = open('/dev/full')",
         "/dev/full is open in it, which a fork would share"),
        ("import os\ndef fork():\n    raise BlockingIOError(11, 'no more processes')\nos.fork = fork\n"
         "import sys, types\nsys.modules['torch.cuda'] = types.SimpleNamespace(is_initialized=lambda: False)",
         "it cannot be forked (no more processes)"),
        ("import sys, types\nsys.modules['torch.cuda'] = types.SimpleNamespace(is_initialized=lambda: True)",
         "CUDA was initialized in it, after which a fork cannot use CUDA"),
        ("import sys, types\nsys.modules['torch.cuda'] = types.SimpleNamespace(\n"
         "    is_initialized=lambda: False, _is_in_bad_fork=lambda: True)",
         "CUDA was initialized in it, after which a fork cannot use CUDA"),
    ],
    ids=["thread", "failed import", "device", "no process left", "CUDA begun", "CUDA asked"],
)  # fmt: skip
def test_what_must_not_be_forked_is_started_by_itself(place: Place, imported: str, explained: str) -> None:
    with place.starter(place.program(IS_FORK, imported=imported)) as starter:
        assert place.run(starter) == (0, "False\n", "")
    assert place.explained == [explained]
    assert place.said == []


def test_a_device_that_is_open_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fork_server._open_device() is None
    monkeypatch.setattr(fork_server, "_DEVICES", ("/dev/ful",))
    with open("/dev/full"):
        assert fork_server._open_device() == "/dev/full"


@pytest.mark.parametrize(
    ("body", "code", "output", "errors"),
    [
        ("print('done')", 0, "done\n", ""),
        ("sys.exit(3)", 3, "", ""),
        ("sys.exit('no disk')", 1, "", "no disk\n"),
        ("sys.exit(None)", 0, "", ""),
        ("os._exit(7)", 7, "", ""),
        ("os.kill(os.getpid(), 9)", -9, "", ""),
        ("atexit.register(print, 'last')\nprint('first')", 0, "first\nlast\n", ""),
        ("threading.Timer(0.05, print, ['late']).start()", 0, "late\n", ""),
        ("signal.signal(10, lambda *_: sys.exit(75))\nos.kill(os.getpid(), 10)\n"
         "signal.pthread_sigmask(signal.SIG_UNBLOCK, [10])", 75, "", ""),
    ],
    ids=["by itself", "code", "text", "none", "at once", "killed", "atexit", "thread", "held signal"],
)  # fmt: skip
def test_how_a_fork_ends(place: Place, body: str, code: int, output: str, errors: str) -> None:
    with place.starter(place.program(f"import atexit, os, signal, sys, threading\n{body}")) as starter:
        assert place.run(starter) == (code, output, errors)
    assert place.explained == []


def test_an_exception_shows_its_traceback(place: Place) -> None:
    with place.starter(place.program("raise ValueError('odd')")) as starter:
        code, output, errors = place.run(starter)
    assert (code, output) == (1, "")
    assert errors.startswith("Traceback (most recent call last):")
    assert errors.endswith("ValueError: odd\n")


ROOT = Path(__file__).resolve().parents[3]
# what a process is like, as far as its own code can tell
FACTS = """
import json, os, resource, signal, sys
streams = [
    [s.name, s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), type(s.buffer).__name__, s.newlines]
    for s in (sys.stdout, sys.stderr)
]
sys.stdout.write("held ")
held = os.fstat(1).st_size
skipped = ("LMTRAIN_ROOM", "PYTHONPATH")
print(json.dumps({
    "streams": streams, "held": held, "stdin": [sys.stdin.encoding, sys.stdin.errors, sys.stdin.read()],
    "cwd": os.getcwd(), "umask": os.umask(0), "nice": os.nice(0), "cpus": sorted(os.sched_getaffinity(0)),
    "limits": [resource.getrlimit(kind) for kind in range(16)], "sid": os.getsid(0) == os.getpid(),
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "dispositions": [str(signal.getsignal(n)).partition(" at ")[0] for n in range(1, 32)],
    "fds": sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}"))[:8],
    "environ": {name: value for name, value in os.environ.items() if name not in skipped},
    "path": sys.path[1:], "argv": sys.argv, "flags": str(sys.flags), "warnings": str(sys.warnoptions),
    "threads": len(os.listdir("/proc/self/task")), "oom": open("/proc/self/oom_score_adj").read(),
}))
"""
LAUNCHER = f"""
import os, resource, signal, sys
from pathlib import Path
from lmtrain.runtime.processes.start_rank_processes import Program
from tests.unit.runtime.starting import Place
place = Place(Path(sys.argv[1]))
os.chdir(place.folder)
os.umask(0o027)
os.nice(3)
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))
with place.starter(Program([str(place.folder / "body.py"), "word"], module="{MODULE}")) as starter:
    print(place.run(starter, {{"RANK": "5"}})[1])
assert bool(place.explained) == (os.environ.get("LMTRAIN_FORK") == "0"), place.explained
"""


def _ignore_as_under_nohup() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize(
    "variables",
    [{"PYTHONIOENCODING": "latin-1:replace", "OMP_NUM_THREADS": "3"}, *wide({}, {"PYTHONUNBUFFERED": "1"})],
)
def test_a_fork_is_like_a_process_of_its_own(tmp_path: Path, variables: Mapping[str, str]) -> None:
    (tmp_path / "body.py").write_text(FACTS)
    found = []
    for fork in ("1", "0"):
        env = {**os.environ, **variables, "LMTRAIN_FORK": fork, "PYTHONPATH": str(ROOT)}
        if "PYTHONUNBUFFERED" not in variables:
            env.pop("PYTHONUNBUFFERED", None)
        done = subprocess.run(
            [sys.executable, "-c", LAUNCHER, str(tmp_path)], env=env, capture_output=True, text=True, timeout=60,
            preexec_fn=_ignore_as_under_nohup,  # because: this process has no other thread that matters
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        found.append(json.loads(done.stdout.removeprefix("held ")))
        found[-1]["environ"].pop("LMTRAIN_FORK")
    assert found[0] == found[1]
    assert found[0]["environ"]["RANK"] == "5"
    assert found[0]["umask"] == 0o027
    assert found[0]["dispositions"][signal.SIGHUP - 1] == "1"  # ignored


def test_two_forks_do_not_share_random_numbers(place: Place) -> None:
    body = "import numpy.random, random, uuid\nprint(random.random(), numpy.random.random(), uuid.uuid4())"
    with place.starter(place.program(body, imported="import numpy.random, random")) as starter:
        first, second = (place.run(starter)[1].split() for _ in range(2))
    assert place.explained == []
    assert len(first) == 3
    assert not set(first) & set(second)


def test_what_was_collected_before_is_not_looked_at_again(place: Place) -> None:
    """A collection would write to every page that forks share."""
    with place.starter(place.program("import gc\nprint(gc.get_freeze_count() > 1000)")) as starter:
        assert place.run(starter)[1] == "True\n"


def test_a_server_whose_launcher_is_gone_ends_in_silence() -> None:
    code = (
        "import socket, subprocess, sys\nours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "ours.close()\nsys.exit(subprocess.run([sys.executable, '-m', 'lmtrain.runtime.processes.fork_server', "
        "str(theirs.fileno())], pass_fds=[theirs.fileno()]).returncode)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# a launcher that is a fork itself, with everything imported: handlers, a lock and a pipe of its own are not for ranks
FORKED_LAUNCHER = f"""
import fcntl, os, select, signal, sys, types
from pathlib import Path
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.processes.start_rank_processes import Program, RankStarter
from tests.unit.runtime.starting import Place
folder, fork = Path(sys.argv[0]).parent, os.environ["LMTRAIN_FORK"]
sys.modules["__main__"].__spec__ = types.SimpleNamespace(name="lmtrain.runtime.processes.fork_server")
if os.environ.get("STRANGER"):
    sys.modules["__main__"].__spec__ = types.SimpleNamespace(name="another.program")
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
lock = open(folder / "lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
reads, writes = os.pipe()
place = Place(folder)
with place.starter(Program([str(folder / "inner.py"), "word"], module={MODULE!r}, imports=["json"])) as starter:
    starter.open()
    server = starter._server
    print(Path(f"/proc/{{server.pid}}/cmdline").read_bytes().split(b"\\0")[0].decode() if server else None)
    assert server is None or os.getsid(server.pid) == server.pid
    os.close(writes)
    assert select.select([reads], [], [], 20)[0], "the server holds a pipe of the launcher"
    lock.close()
    with open(folder / "lock") as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    code, output, errors = place.run(starter, {{"RANK": "5"}})
    print(output, end="")
    print(code, errors, place.said, place.explained)
"""


def run_forked_launcher(tmp_path: Path, **variables: str) -> list[str]:
    (tmp_path / "inner.py").write_text(FACTS)
    place = Place(tmp_path)
    program = place.program(FORKED_LAUNCHER, imported="import json, numpy, tests.unit.runtime.starting")
    with place.starter(program) as starter:
        code, output, errors = place.run(starter, {"LMTRAIN_FORK": "1"} | variables)
    assert (code, errors, place.explained) == (0, "", [])
    return output.splitlines()


def test_a_launcher_that_has_imported_everything_forks_the_server_from_itself(tmp_path: Path) -> None:
    server, facts, end = run_forked_launcher(tmp_path)
    assert server.startswith(f"lmtrain.runtime.processes.fork_server {tmp_path}")
    assert end == "0  [] []"
    _, wanted, end = run_forked_launcher(tmp_path, LMTRAIN_FORK="0")
    assert end == "0  [] ['LMTRAIN_FORK=0 asks for it']"
    found, started = (json.loads(text.removeprefix("held ")) for text in (facts, wanted))
    for of in (found, started):
        of.pop("fds")  # because: descriptors of the launcher lead nowhere in its forks
        of["environ"].pop("LMTRAIN_FORK")
        of["environ"].pop("LC_CTYPE", None)
    assert found == started


def test_another_program_that_calls_the_launcher_is_not_forked(tmp_path: Path) -> None:
    server, _, end = run_forked_launcher(tmp_path, STRANGER="1")
    assert server == sys.executable
    assert end == "0  [] []"
