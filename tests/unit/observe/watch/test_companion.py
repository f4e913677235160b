"""What a companion reads of its rank in the system's books, and that it ends with its rank."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.phases import NUM_BYTES
from lmtrain.observe.watch.companion import Companion, how_ended, state_of
from lmtrain.observe.watch.guard import _CODE, _ROOT
from lmtrain.observe.watch.judge import LOST_KIND

PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")


@PROC
def test_a_process_that_is_stopped_and_one_that_is_killed() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert state_of(process.pid)[0] == "running"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert state_of(process.pid)[0] == "stopped"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert how_ended(process.pid) == "was ended by SIGKILL"
    assert how_ended(process.pid) == "ended without a word, as one that is killed"
    assert state_of(process.pid) == ("running", 0.0)
    assert state_of(os.getpid())[1] > 0


def told_of(folder: Path, control: int, marks: int, stacks: int) -> dict[str, Any]:
    return {
        "rank": 0, "host": "n1", "pid": os.getpid(), "folder": str(folder), "timeout_s": 60.0, "world_size": 2,
        "on_node": True, "secret": "secret", "address": None, "control": control, "marks": marks, "stacks": stacks,
    }  # fmt: skip


def test_a_rank_that_is_leaving_has_no_less_time_where_another_one_has_failed(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as marks, tempfile.TemporaryFile() as stacks, ours:
        marks.truncate(NUM_BYTES)
        companion = Companion(told_of(tmp_path, theirs.detach(), marks.fileno(), stacks.fileno()))
        ours.sendall(b'{"failed": "the ranks of this run differ", "code": 2}\n')
        companion.hear_rank()
        due = companion.deadline
        assert due is not None
        companion.obey({"verdict": "rank 1 ended with exit code 2.", "kind": LOST_KIND, "ranks": [1]})
        assert companion.deadline == due
        companion.selector.close()
        companion.control.close()
        assert companion.hub is not None
        companion.hub.listener.close()


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
