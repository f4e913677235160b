"""A rank's side: one process alone is not watched, and a stop before the first step is no loss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmtrain.errors import PeerLostError, StoppedEarly
from lmtrain.observe.hang_watch.start_companion_and_raise_verdict import Watch, watch_run
from lmtrain.runtime.processes import current_phase
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.processes.process_group import RunGroup
from lmtrain.runtime.processes.start_rank_processes import ForkedProcess

VERDICT = {"verdict": "rank 1 on n1 is gone.", "kind": "lost", "ranks": [1]}


def watch() -> Watch:
    return Watch(ProcessEnv(0, 2, host="n1"), lambda name: None, lambda error: None)


def test_a_process_alone_has_nobody_to_watch(tmp_path: Path) -> None:
    with watch_run(ProcessEnv(host="n1"), RunGroup(("n1",)), tmp_path, 60.0) as alone:
        alone.send_stop("SIGTERM")
    assert list(tmp_path.iterdir()) == []


def test_a_companion_that_was_forked_is_waited_for_and_killed() -> None:
    """On systems without pidfd_open too."""
    with subprocess.Popen(["sleep", "60"]) as process:
        companion = ForkedProcess(process.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            companion.wait(0.05)
        companion.kill()
        companion.wait()
        companion.wait(0.0)
        companion.kill()  # because: another process may have its number by now, and must not be met
        with pytest.raises(ChildProcessError):
            os.waitpid(process.pid, 0)
        process.returncode = 0


def test_its_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(KeyError), watch_run(ProcessEnv(host="n1"), RunGroup(("n1",)), tmp_path, 60.0):
        raise KeyError("x")


def test_a_peer_that_was_told_to_stop_before_the_first_step_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_phase, "main", current_phase.ThreadPosition(0))
    one = watch()
    lost = one.verdict_error(VERDICT)
    assert isinstance(lost, PeerLostError)
    assert (str(lost), lost.rank) == ("rank 1 on n1 is gone. Start the same command again to go on.", 1)
    one.stop_signal = "SIGTERM"
    current_phase.main.enter("data", 1)
    assert isinstance(one.verdict_error(VERDICT), StoppedEarly)
    current_phase.main.enter("data", 2)
    assert isinstance(one.verdict_error(VERDICT), PeerLostError)


# what both of the pairs below begin with; they are forks of one process, since it takes long to import torch
HEAD = """
import os, sys, threading
from pathlib import Path
import torch.distributed as dist
from lmtrain.errors import PeerLostError
from lmtrain.runtime.processes import current_phase
from lmtrain.observe.hang_watch.start_companion_and_raise_verdict import watch_run
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.processes.process_group import RunGroup
from lmtrain.runtime.processes.start_rank_processes import ForkedProcess

folder, heard, ranks = Path(sys.argv[1]), threading.Event(), []
for rank in (0, 1):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        break
else:
    print(*ranks, flush=True)
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks))
    sys.exit()
met = RunGroup(("n1", "n1"), dist.FileStore(str(folder / "store"), 2))
"""
WAITS_ON_ITS_DEVICE = """
try:
    with watch_run(ProcessEnv(rank, 2, host="n1"), met, folder, 60.0, lambda _: heard.set(), on_device=True) as watch:
        if rank == 1:
            watch.send_stop("a word by which rank 0 knows that the other's companion has come")
        else:
            heard.wait()
        current_phase.enter("data", 1)  # because: who is asked to stop before its second step has nothing to lose
        current_phase.enter("data", 2)
        print("in", flush=True)
        threading.Event().wait()
except PeerLostError as error:
    print(error, flush=True)
    raise SystemExit(error.exit_code)
"""
LATE = """
with watch_run(ProcessEnv(rank, 2, host="n1"), met, folder, 60.0, lambda name: heard.set()) as watch:
    if rank == 1:
        listens = next(thread for thread in threading.enumerate() if thread.name == "watch")
        watch.send_stop("a word by which rank 0 knows that the other's companion has come")
        listens.join()
    else:
        heard.wait()
"""


@contextmanager
def pair(folder: Path, code: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Run the code on two ranks, and yield their parent and their process ids; the parent prints how they end."""
    command = [sys.executable, "-c", HEAD + code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as mother:
        assert mother.stdout is not None
        yield mother, [int(word) for word in mother.stdout.readline().split()]


@pytest.mark.wide
def test_one_that_waits_on_its_device_ends_when_a_peer_is_lost(tmp_path: Path) -> None:
    """The main thread waits where no error of a collective reaches it, as in a copy from a GPU that waits for NCCL."""
    with pair(tmp_path, WAITS_ON_ITS_DEVICE) as (mother, pids):
        assert mother.stdout is not None
        assert [mother.stdout.readline() for _ in pids] == ["in\n", "in\n"]
        os.kill(pids[1], signal.SIGKILL)
        assert mother.communicate(timeout=120)[0] == f"76 {-signal.SIGKILL}\n"


@pytest.mark.wide
def test_one_that_is_done_after_rank_0_does_not_miss_its_companion(tmp_path: Path) -> None:
    with pair(tmp_path, LATE) as (mother, _):
        assert mother.communicate(timeout=120) == ("0 0\n", "")
