"""Our own launcher with small torch-free children: who fails first wins, signals arrive, nobody is left behind."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmtrain.runtime.processes import local_rank_launcher as local_rank_launcher
from lmtrain.runtime.processes.local_rank_launcher import Outcome
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.processes.start_rank_processes import Program, is_in_state
from tests.marks import wide
from tests.unit.runtime.starting import children

# what every child begins with; `wait()` blocks until something ends it
HEAD = """
import os, signal, sys, threading
from lmtrain.runtime.processes.local_rank_launcher import end_with_launcher
from lmtrain.runtime.processes.stop_signals import unblock_stops
end_with_launcher()
rank = int(os.environ["RANK"])
def wait():
    unblock_stops()
    while not threading.Event().wait(1.0):  # looks up for signals that another thread was given
        pass
"""


_folder = tempfile.TemporaryDirectory(prefix="lmtrain-launched-")


def child(body: str) -> Program:
    """A program whose ranks run this code, and for which nothing has to be imported."""
    path = Path(_folder.name, f"{hashlib.sha256(body.encode()).hexdigest()[:16]}.py")
    path.write_text(HEAD + body)
    return Program([str(path)], module="tests.unit.runtime.launched")


def launch(program: Program, num: int, **options: Any) -> Outcome:
    return local_rank_launcher.launch(program, ProcessEnv().as_launcher(num), **options)


@pytest.fixture(params=["fork", *wide("process")])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ranks are forked from a server, or where that is not safe started each by itself."""
    monkeypatch.setenv("LMTRAIN_FORK", "0" if request.param == "process" else "1")
    return str(request.param)


@pytest.mark.usefixtures("way")
def test_all_go_well(capfd: pytest.CaptureFixture[str]) -> None:
    body = 'print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True); print("oops", file=sys.stderr)'
    assert launch(child(body), 3) == Outcome(0)
    output, errors = capfd.readouterr()
    assert output == "rank 0 of 3\n"
    assert {line for line in errors.splitlines() if line != "oops"} == {
        "[rank 1] rank 1 of 3", "[rank 1] oops", "[rank 2] rank 2 of 3", "[rank 2] oops"
    }  # fmt: skip
    assert "oops" in errors.splitlines()


def test_the_first_failure_wins_and_ends_the_rest(capfd: pytest.CaptureFixture[str]) -> None:
    body = 'if rank == 1:\n    print("error: no more disk", file=sys.stderr)\n    sys.exit(74)\nwait()'
    outcome = launch(child(body), 3, grace_s=0.0)
    assert outcome == Outcome(
        74, 1, "rank 1 of 3 failed with exit code 74; the other 2 had to be killed: no more disk."
    )  # fmt: skip
    assert "[rank 1] error: no more disk" in capfd.readouterr().err


def test_rank_0_speaks_where_all_end_for_one_reason() -> None:
    body = "import time\nif rank == 0:\n    time.sleep(0.2)\nsys.exit(2)"
    assert launch(child(body), 3) == Outcome(2, 0, None)


def test_those_that_stood_still_are_named_and_not_those_that_waited() -> None:
    body = "if rank in (2, 4):\n    wait()\nos.close(0)\nsys.exit(76)"
    place = ProcessEnv(2, 5, launcher="slurm", host="n2", num_ranks=3)
    outcome = local_rank_launcher.launch(child(body), place, grace_s=0.0)
    assert outcome == Outcome(
        76, 2, "ranks 2 and 4 on n2 hung while the others waited, and had to be killed."
    )  # fmt: skip


NODE = ProcessEnv(2, 4, launcher="slurm", host="n2", num_ranks=2)  # the second of two nodes
SILENT, SPEAKS = "sys.exit({})", 'if rank == 3:\n    print("error: full")\nsys.exit({})'


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (SILENT.format("76 if rank == 2 else 0"), Outcome(76, 2, None)),
        (SILENT.format(2), Outcome(2, 2, None)),
        (SPEAKS.format(74), Outcome(74, 3, "rank 3 on n2 failed with exit code 74: full.")),
        (SILENT.format("74 if rank == 3 else 76"), Outcome(74, 3, "rank 3 on n2 failed with exit code 74: it printed "
                                                           "nothing.")),
    ],
    ids=["a peer is lost", "rank 0 says it", "one says it", "one ends"],
)  # fmt: skip
def test_the_launcher_of_another_node_says_what_is_of_its_node(body: str, outcome: Outcome) -> None:
    assert local_rank_launcher.launch(child(body), NODE) == outcome


def test_a_killed_process_is_named_and_those_that_miss_it_are_not() -> None:
    """The others find their peer gone and end by themselves, with the code for that."""
    body = "if rank == 3:\n    os.kill(os.getpid(), signal.SIGKILL)\nos.close(0)\nsys.exit(76)"
    outcome = local_rank_launcher.launch(child(body), NODE)
    assert outcome == Outcome(76, 3, "rank 3 on n2 was ended by SIGKILL, and the run with it.", signal=9)
    assert outcome.shell_code == 137


def test_a_stop_with_a_checkpoint_is_no_failure() -> None:
    assert launch(child("sys.exit(75)"), 2, grace_s=0.0) == Outcome(75)


def parent(
    folder: Path, body: str, num: int = 2, options: str = "", imports: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """A launcher in a process of its own; each child makes a pipe's line once it is ready."""
    program = replace(child(body), imports=imports)
    code = (
        "import sys\nfrom lmtrain.runtime.processes.local_rank_launcher import launch\n"
        "from lmtrain.runtime.processes.process_environment import ProcessEnv\n"
        "from lmtrain.runtime.processes.start_rank_processes import Program\n"
        f"outcome = launch({program!r}, ProcessEnv().as_launcher({num}){options})\n"
        "print('outcome', outcome.exit_code, outcome.cause)\nsys.exit(outcome.exit_code)"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


READY = 'os.write(os.open(os.environ["READY"], os.O_WRONLY), b"%d\\n" % os.getpid())\n'


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Waits until so many children have written their process id into a fifo."""
    fifo = tmp_path / "ready"
    os.mkfifo(fifo)
    monkeypatch.setenv("READY", str(fifo))
    fd = os.open(fifo, os.O_RDWR)

    def read(count: int) -> list[int]:
        text = b""
        while text.count(b"\n") < count:
            assert select.select([fd], [], [], 60)[0], "the children do not start"
            text += os.read(fd, 1000)
        return [int(line) for line in text.split()]

    return read


def gone(pid: int) -> None:
    """Returns when a process that is not ours to wait for has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([fd], [], [], 60)[0], f"{pid} lives on"
    os.close(fd)


@pytest.mark.parametrize("number", [signal.SIGTERM, *wide(signal.SIGINT)])
def test_signals_reach_every_child_once(
    tmp_path: Path, ready: Callable[[int], list[int]], number: signal.Signals
) -> None:
    body = f"signal.signal({int(number)}, lambda *_: sys.exit(75))\n{READY}wait()"
    job = parent(tmp_path, body)
    ready(2)
    job.send_signal(number)
    output, _ = job.communicate(timeout=120)
    assert "outcome 75 None" in output


@pytest.mark.parametrize("number", [signal.SIGUSR1, *wide(signal.SIGTERM)])
def test_a_signal_to_children_that_do_nothing_about_it(
    tmp_path: Path, ready: Callable[[int], list[int]], number: signal.Signals
) -> None:
    job = parent(tmp_path, f"{READY}wait()")
    ready(2)
    job.send_signal(number)
    output, _ = job.communicate(timeout=120)
    assert f"outcome 75 {number.name} ended rank 0 at once, and the others with it." in output


def test_a_signal_that_comes_before_a_child_can_hear_it_waits(
    tmp_path: Path, ready: Callable[[int], list[int]]
) -> None:
    """It neither ends the child, which has no handler yet, nor is it lost."""
    hear = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
    went_on = tmp_path / "go on"
    os.mkfifo(went_on)
    job = parent(tmp_path, f"{READY}open({str(went_on)!r}).read()\n{hear}wait()", num=1)
    ready(1)
    job.send_signal(signal.SIGUSR1)
    went_on.write_text("")  # returns when the child has opened it too
    output, _ = job.communicate(timeout=120)
    assert "outcome 75 None" in output


@pytest.mark.wide
def test_a_lost_job_starts_again_and_knows_which_start_it_is() -> None:
    body = 'count = int(os.environ["LMTRAIN_RESTART_COUNT"])\nif count < 2 and rank == 1:\n    os.abort()\nsys.exit(75)'
    heard: list[tuple[int, int | None, int]] = []
    outcome = launch(
        child(body), 2, grace_s=0.0, max_restarts=3,
        on_restart=lambda outcome, number: heard.append((outcome.exit_code, outcome.rank, number)),
    )  # fmt: skip
    assert outcome == Outcome(75)
    assert heard == [(76, 1, 2), (76, 1, 3)]


@pytest.mark.wide
def test_each_start_has_a_store_and_a_token_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    body = 'print(os.environ["LMTRAIN_RUN_TOKEN"], flush=True)\nsys.exit(76)'
    assert launch(child(body), 1, max_restarts=1).exit_code == 76
    first, second = capfd.readouterr().out.split()
    assert first != second


@pytest.mark.parametrize("code", [0, 2, 65, 66, 73, 74, 75, 78, 86, 93, 130])
def test_what_another_start_would_not_change_is_final(code: int) -> None:
    assert not Outcome(code).is_restartable


@pytest.mark.parametrize("code", [1, 70, 76])
def test_what_another_start_may_change(code: int) -> None:
    assert Outcome(code).is_restartable


def test_a_signal_ends_the_starting_again(tmp_path: Path, ready: Callable[[int], list[int]]) -> None:
    """It comes while the job is lost, so that no child is left to hear it."""
    job = parent(tmp_path, f"{READY}os.read(0, 1)", num=1, options=", max_restarts=5")
    (pid,) = ready(1)
    job.send_signal(signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    job.send_signal(signal.SIGTERM)
    job.send_signal(signal.SIGCONT)
    output, _ = job.communicate(timeout=120)
    assert "outcome 75 SIGTERM came while the run was stopped: rank 0 of 1 was ended by SIGKILL" in output


@pytest.mark.wide
def test_a_child_that_stands_still_when_the_others_have_ended_is_killed(
    ready: Callable[[int], list[int]],
) -> None:
    body = f"{READY}if rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    outcome = launch(child(body), 2, grace_s=0.0)
    assert outcome == Outcome(76, 1, "rank 1 of 2 hung when the others had ended, and had to be killed.")


def test_a_child_that_has_just_ended_does_not_stand_still() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], text=True) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert not is_in_state(os.WSTOPPED, ended.pid)


def test_helpers_of_children_end_with_them(ready: Callable[[int], list[int]]) -> None:
    helper = 'import subprocess\nhelper = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)\n'
    report = 'os.write(os.open(os.environ["READY"], os.O_WRONLY), b"%d\\n" % helper.pid)\n'
    assert launch(child(helper + report), 1) == Outcome(0)
    (pid,) = ready(1)
    gone(pid)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd_open")
@pytest.mark.parametrize(
    ("state", "number"),
    [("holds the lock", signal.SIGKILL),
     *wide(("runs", signal.SIGKILL), ("runs", signal.SIGHUP), ("stands still", signal.SIGKILL))],
)  # fmt: skip
def test_no_orphan_however_the_parent_ends(
    tmp_path: Path, ready: Callable[[int], list[int]], number: signal.Signals, state: str
) -> None:
    """Not even a helper that a child has started."""
    end = {
        "runs": "wait()",
        "stands still": "os.kill(os.getpid(), signal.SIGSTOP)",
        "holds the lock": "import re; re.match(r'(a?){40}a{40}', 'a' * 40)",
    }[state]
    helper = 'import subprocess\nhelper = subprocess.Popen(["sleep", "600"])\n'
    report = 'os.write(os.open(os.environ["READY"], os.O_WRONLY), b"%d\\n%d\\n" % (os.getpid(), helper.pid))\n'
    job = parent(tmp_path, f"{helper}{report}{end}")
    pids = ready(4)
    job.send_signal(number)
    job.communicate(timeout=120)
    for pid in pids:
        gone(pid)


def titled(job: subprocess.Popen[str], title: str, but: int = 0) -> int:
    """Return the child of a launcher that has this title, once there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for pid in map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()):
            with suppress(OSError):
                if pid != but and title in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                    return pid
        time.sleep(0.01)
    raise AssertionError(f"no {title}")


@pytest.mark.parametrize("at", ["the start", *wide("a run")])
def test_a_guardian_that_was_killed_is_replaced(
    tmp_path: Path, ready: Callable[[int], list[int]], at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is told of a rank, or later; the ranks that it had been told of are safe again."""
    imported = "import os, pathlib\nmain = __import__('sys').modules['__main__']\nfork = main.fork_for_launcher\n"
    imported += "count = []\ndef wait_and_fork():\n    count.append(1)\n    if len(count) == 3:\n"
    imported += f"        open({str(tmp_path / 'go on')!r}).read()\n    return fork()\n"
    imported += "main.fork_for_launcher = wait_and_fork"
    (tmp_path / "waits_before_rank_1.py").write_text(imported)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    os.mkfifo(tmp_path / "go on")
    held = at == "the start"
    # a child that stands still does not end with its launcher by itself
    job = parent(tmp_path, f"{READY}os.kill(os.getpid(), signal.SIGSTOP)", imports=["waits_before_rank_1"] * held)
    pids = ready(1 if held else 2)
    first = titled(job, "guardian")
    os.kill(first, signal.SIGKILL)
    if held:
        gone(first)
        (tmp_path / "go on").write_text("")
        pids += ready(1)
    titled(job, "guardian" if held else "kill_orphaned_ranks", but=first)  # because: the fork server has ended by then
    time.sleep(0.0 if held else 0.2)  # because: it is started before it is told of the ranks
    job.kill()
    job.communicate(timeout=120)
    for pid in pids:
        gone(pid)


def test_a_stop_while_the_server_imports_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    job = parent(tmp_path, "wait()", imports=["takes_long"])
    server = titled(job, "fork_server")
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=50)
    assert "outcome 75 SIGUSR1 came before all ranks were started." in output
    gone(server)


def test_a_thread_that_cannot_be_started_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    before = children()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(BlockingIOError):
        launch(child("wait()"), 1)
    assert children() == before


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    launch(child("pass"), 1)
    assert signal.getsignal(signal.SIGTERM) is before
    assert threading.current_thread() is threading.main_thread()
