"""What a companion reads of its rank in the system's books, and that it ends with its rank."""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.hang_watch.hang_verdict import LOST_KIND
from lmtrain.observe.hang_watch.heartbeat_server import Hub
from lmtrain.observe.hang_watch.start_companion_and_raise_verdict import _CODE, _ROOT
from lmtrain.observe.hang_watch.watchdog_companion_process import (
    _TICK_S,
    DEVICE_GRACE_S,
    GRACE_S,
    Companion,
    describe_exit,
    main_of_fork,
    process_state,
)
from lmtrain.runtime.processes.current_phase import NUM_BYTES
from tests.unit.observe.watch.test_hub import met

PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")


@PROC
def test_a_process_that_is_stopped_and_one_that_is_killed() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert process_state(process.pid)[0] == "running"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert process_state(process.pid)[0] == "stopped"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert describe_exit(process.pid) == "was ended by SIGKILL"
    assert describe_exit(process.pid) == "ended without a word, as if killed"
    assert process_state(process.pid) == ("running", 0.0)
    assert process_state(os.getpid())[1] > 0


def told_of(folder: Path, control: int, marks: int, stacks: int) -> dict[str, Any]:
    return {
        "rank": 0, "host": "n1", "pid": os.getpid(), "folder": str(folder), "timeout_s": 60.0, "world_size": 2,
        "on_node": True, "secret": "secret", "address": None, "control": control, "marks": marks, "stacks": stacks,
        "polite_s": GRACE_S,
    }  # fmt: skip


def test_a_rank_that_is_leaving_has_no_less_time_where_another_one_has_failed(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as marks, tempfile.TemporaryFile() as stacks, ours:
        marks.truncate(NUM_BYTES)
        companion = Companion(told_of(tmp_path, theirs.detach(), marks.fileno(), stacks.fileno()))
        ours.sendall(b'{"failed": "the ranks of this run differ", "code": 2}\n')
        companion.receive_from_rank()
        due = companion.deadline
        assert due is not None
        companion.handle_message({"verdict": "rank 1 ended with exit code 2.", "kind": LOST_KIND, "ranks": [1]})
        assert companion.deadline == due
        companion.selector.close()
        companion.rank_connection.close()
        assert companion.hub is not None
        companion.hub.listener.close()


@pytest.mark.parametrize(("polite_s", "in_time"), [(DEVICE_GRACE_S, True), (GRACE_S, False)])
def test_a_rank_that_waits_on_its_device_is_given_less_time(
    tmp_path: Path, polite_s: dict[str, float], in_time: bool
) -> None:
    """All of it is over in 5 s: the look at a rank that is gone, what the other is given, the look at that one.

    What ranks are given that talk by gloo, planted here, is longer than that.
    """
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as marks, tempfile.TemporaryFile() as stacks, ours:
        marks.truncate(NUM_BYTES)
        told = told_of(tmp_path, theirs.detach(), marks.fileno(), stacks.fileno()) | {"polite_s": polite_s}
        companion = Companion(told)
        companion.handle_message({"verdict": "rank 1 was ended by SIGKILL.", "kind": LOST_KIND, "ranks": [1]})
        assert companion.deadline is not None
        assert (companion.deadline - time.monotonic() + 2 * _TICK_S < 5.0) is in_time
        companion.selector.close()
        companion.rank_connection.close()
        assert companion.hub is not None
        companion.hub.listener.close()


@contextmanager
def of_rank_1(folder: Path, address: tuple[str, int]) -> Iterator[tuple[Companion, socket.socket]]:
    """A companion in this process, and what its rank hears of it."""
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as marks, tempfile.TemporaryFile() as stacks, ours:
        marks.truncate(NUM_BYTES)
        told = told_of(folder, theirs.detach(), marks.fileno(), stacks.fileno()) | {"rank": 1, "address": address}
        companion = Companion(told)
        yield companion, ours
        companion.selector.close()
        companion.rank_connection.close()
        assert companion.hub_connection is not None
        companion.hub_connection.close()


def test_a_hub_that_falls_silent_is_noticed_unless_this_process_has_slept(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub, of_rank_1(tmp_path, hub.getsockname()) as (companion, ours):
        companion.hub_message_at -= 100.0
        companion.checked_at -= 100.0
        companion.check_rank()
        assert companion.verdict is None
        companion.hub_message_at -= 40.0  # which is long enough, however long the ranks wait for each other
        companion.check_rank()
        assert companion.verdict is not None
        told = json.loads(ours.makefile().readline())
        assert (told["kind"], told["ranks"], told["end"]) == (LOST_KIND, [0], True)
        assert told["verdict"].startswith("rank 0 at 127.0.0.1 and its companion send no heartbeats any more")
    assert json.loads((tmp_path / "stop.json").read_text())["lost"] == 0


def test_a_hub_that_is_there_says_so(tmp_path: Path) -> None:
    hub = Hub(selectors.DefaultSelector(), 0, "secret", str(tmp_path), 60.0, 2, single_node=True)
    with of_rank_1(tmp_path, ("127.0.0.1", hub.port)) as (companion, _):
        peer = met(hub)
        hub.tick()
        companion.hub_message_at -= 100.0
        assert companion.selector.select(60.0)
        companion.receive_from_hub()
        companion.check_rank()
        assert companion.verdict is None
    hub.drop_peer(peer)
    hub.listener.close()
    hub.selector.close()


@pytest.mark.wide
def test_a_hub_that_is_stopped_is_lost_to_the_others(tmp_path: Path) -> None:
    """As its whole node may be: no connection closes."""
    pairs = [socket.socketpair() for _ in range(2)]
    with tempfile.TemporaryFile() as marks, tempfile.TemporaryFile() as stacks:
        marks.truncate(NUM_BYTES)
        processes, address = [], None
        for rank, (ours, theirs) in enumerate(pairs):
            told = told_of(tmp_path, theirs.fileno(), marks.fileno(), stacks.fileno())
            told |= {"rank": rank, "address": address, "pid": 0, "timeout_s": (60.0, 2.5)[rank]}
            processes.append(subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, str(_ROOT), json.dumps(told)],
                pass_fds=[theirs.fileno(), marks.fileno(), stacks.fileno()],
            ))  # fmt: skip
            theirs.close()
            if rank == 0:
                address = ("127.0.0.1", json.loads(ours.recv(100))["port"])
        heard = pairs[1][0].makefile()
        pairs[0][0].sendall(b'{"stop": "a word by which rank 1 knows that it is met"}\n')
        assert "stop" in json.loads(heard.readline())
        processes[0].send_signal(signal.SIGSTOP)
        told = json.loads(heard.readline())
        assert (told["kind"], told["ranks"], told["end"]) == (LOST_KIND, [0], True)
        processes[0].kill()
        for (ours, _), process in zip(pairs, processes, strict=True):
            ours.close()
            heard.close()
            process.wait(60)


def test_it_needs_little_and_ends_when_its_rank_does(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as marks, tempfile.TemporaryFile() as stacks, ours, theirs:
        marks.truncate(NUM_BYTES)
        mmap.mmap(marks.fileno(), NUM_BYTES).close()
        told = told_of(tmp_path, theirs.fileno(), marks.fileno(), stacks.fileno())
        code = _CODE + "; print(sorted({'torch', 'numpy', 'typing', 'dataclasses', 'site'} & set(sys.modules)))"
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, str(_ROOT), json.dumps(told)], stdout=subprocess.PIPE, text=True,
            pass_fds=[theirs.fileno(), marks.fileno(), stacks.fileno()],
        )  # fmt: skip
        theirs.close()
        assert json.loads(ours.recv(100))["port"] > 0
        ours.sendall(b'{"done": true}\n')
        output, _ = process.communicate(timeout=120)
    assert (process.returncode, output) == (0, "[]\n")
    assert json.loads((tmp_path / "phase_times.json").read_text())["processes"] == 2


def test_a_forked_companion_holds_nothing_of_its_rank() -> None:
    """A pipe of the rank closes when the rank closes it, and a companion that is told nothing ends with its rank."""
    ours, theirs = socket.socketpair()
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            main_of_fork(theirs)
        finally:
            os._exit(0)
    theirs.close()
    os.close(writes)
    assert os.read(reads, 1) == b""
    os.close(reads)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    ours.close()
    assert os.waitpid(pid, 0) == (pid, 0)
