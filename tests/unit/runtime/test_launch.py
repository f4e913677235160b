"""Our own launcher with small torch-free children: who fails first wins, signals arrive, nobody is left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lmtrain.runtime.launch import Outcome, launch

# what every child begins with; `wait()` blocks until something ends it
HEAD = """
import os, signal, sys, threading
from lmtrain.runtime.launch import follow_launcher
follow_launcher()
rank = int(os.environ["RANK"])
def wait():
    while not threading.Event().wait(1.0):  # looks up for signals that another thread was given
        pass
"""


def child(body: str) -> list[str]:
    return [sys.executable, "-c", HEAD + body]


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
        74, 1, "rank 1 of 3 failed with exit code 74; the other 2 had to be killed: no more disk"
    )  # fmt: skip
    assert "[rank 1] error: no more disk" in capfd.readouterr().err


def test_what_rank_0_has_said_is_not_said_again() -> None:
    assert launch(child("sys.exit(65 if rank == 0 else 0)"), 2) == Outcome(65, 0, None)


def test_rank_0_speaks_where_all_end_for_one_reason() -> None:
    body = "import time\nif rank == 0:\n    time.sleep(0.5)\nsys.exit(2)"
    assert launch(child(body), 3) == Outcome(2, 0, None)


def test_a_killed_process_is_named_and_those_that_miss_it_are_not() -> None:
    """The others find their peer gone and end by themselves, with the code for that."""
    body = (
        "if rank == 2:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.close(0)\nsys.exit(76)"
    )  # fmt: skip
    outcome = launch(child(body), 3)
    assert (outcome.exit_code, outcome.rank) == (76, 2)
    assert "rank 2 of 3 was ended by SIGKILL" in str(outcome.cause)


def test_those_that_stood_still_are_named_and_not_those_that_waited() -> None:
    body = "if rank in (0, 2):\n    wait()\nos.close(0)\nsys.exit(76)"
    outcome = launch(child(body), 4, grace_s=0.5)
    assert outcome == Outcome(
        76, 0, "ranks 0 and 2 of 4 stood still while the others waited, and had to be killed. Start the same command "
        "again to go on."
    )  # fmt: skip


def test_lost_peers_alone() -> None:
    assert launch(child("sys.exit(76 if rank == 1 else 0)"), 2).exit_code == 76


def test_a_stop_with_a_checkpoint_is_no_failure() -> None:
    assert launch(child("sys.exit(75)"), 2, grace_s=0.0) == Outcome(75)


def parent(folder: Path, body: str, num: int = 2) -> subprocess.Popen[str]:
    """A launcher in a process of its own; each child makes a pipe's line once it is ready."""
    (folder / "child.py").write_text(HEAD + body)
    code = (
        "import sys\nfrom lmtrain.runtime.launch import launch\n"
        f"outcome = launch([sys.executable, {str(folder / 'child.py')!r}], {num})\n"
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_every_child_once(
    tmp_path: Path, ready: Callable[[int], list[int]], number: signal.Signals
) -> None:
    body = f"signal.signal({int(number)}, lambda *_: sys.exit(75))\n{READY}wait()"
    job = parent(tmp_path, body)
    ready(2)
    job.send_signal(number)
    output, _ = job.communicate(timeout=120)
    assert "outcome 75 None" in output


def test_a_signal_before_training_began(tmp_path: Path, ready: Callable[[int], list[int]]) -> None:
    job = parent(tmp_path, f"{READY}wait()")
    ready(2)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=120)
    assert "outcome 143 SIGTERM came before the work began." in output


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd_open")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_no_orphan_however_the_parent_ends(
    tmp_path: Path, ready: Callable[[int], list[int]], number: signal.Signals
) -> None:
    """Not even a helper that a child has started."""
    helper = 'import subprocess\nhelper = subprocess.Popen(["sleep", "600"])\n'
    report = 'os.write(os.open(os.environ["READY"], os.O_WRONLY), b"%d\\n%d\\n" % (os.getpid(), helper.pid))\n'
    job = parent(tmp_path, f"{helper}{report}wait()")
    pids = ready(4)
    job.send_signal(number)
    job.communicate(timeout=120)
    for pid in pids:
        gone(pid)


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    launch(child("pass"), 1)
    assert signal.getsignal(signal.SIGTERM) is before
    assert threading.current_thread() is threading.main_thread()
