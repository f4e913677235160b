"""Processes meet as each launcher says; one that is gone or silent becomes an error that says who waited."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lmtrain.errors import DataError, PeerLostError, UsageError
from lmtrain.runtime.processes.process_environment import STORE_FD_VARIABLE, ProcessEnv
from lmtrain.runtime.processes.process_group import new_group, open_process_group, peer_errors
from tests.marks import slow

HERE = ProcessEnv(rank=1, world_size=2, host="n2")
CPU = torch.device("cpu")


def test_one_process_starts_nothing() -> None:
    with open_process_group(ProcessEnv(host="here"), CPU, 60.0) as met:
        assert met.hosts == ("here",)
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/src/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:4. This is a pity."),
        RuntimeError("Timed out waiting 60000ms for recv operation to complete"),
        dist.DistStoreError("wait timeout after 60000ms"),
        dist.DistBackendError("NCCL error: remote process exited"),
    ],
)
def test_what_torch_raises_for_a_lost_peer(error: RuntimeError) -> None:
    with pytest.raises(PeerLostError, match=r"rank 1 on n2 waited for its peers in .*timeout_s=60") as caught, \
            peer_errors(HERE, 60.0):  # fmt: skip
        raise error
    assert caught.value.exit_code == 76
    assert "gloo/transport" not in str(caught.value)
    assert "pity" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not fit"), ValueError("gloo"), DataError("gloo"), KeyboardInterrupt()]
)
def test_other_errors_stay_what_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, peer_errors(HERE, 60.0):
        raise error
    assert caught.value is error


def test_a_port_in_use_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UsageError, match=f"Port {port} cannot be opened: it is in use"), \
                open_process_group(ProcessEnv(0, 2, launcher="slurm", host="here"), CPU, 5.0):  # fmt: skip
            pass


# what each process of the tests below runs: arguments are the rank that misbehaves and how
CODE = """
import os, signal, sys, threading
import torch, torch.distributed as dist
from lmtrain.cli.screen.print_messages_and_json import print_error
from lmtrain.errors import PeerLostError
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.runtime.processes.process_group import open_process_group
env, culprit, deed = ProcessEnv.detect(), int(sys.argv[1]), sys.argv[2]
number = torch.tensor([env.rank + 1.0])
try:
    with open_process_group(env, torch.device("cpu"), float(sys.argv[3])) as met:
        print("NCCL", os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"], file=sys.stderr)
        if env.rank == culprit:
            print("ready", flush=True)
            if deed == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()
        dist.all_reduce(number)
        print(env.launcher, number.item(), *met.hosts, flush=True)
except PeerLostError as error:
    print_error(error)
    sys.exit(error.exit_code)
"""


def processes(environments: Sequence[Mapping[str, str]], *arguments: object, fds: tuple[int, ...] = ()) -> list[Any]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return [
        subprocess.Popen(
            [sys.executable, "-c", CODE, *map(str, arguments)], env=base | dict(env) | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=fds,
        )
        for env in environments
    ]  # fmt: skip


def ours(num: int) -> tuple[list[Mapping[str, str]], socket.socket]:
    store = socket.create_server(("127.0.0.1", 0))
    port, fd = store.getsockname()[1], store.fileno()
    ranks = ProcessEnv().as_launcher(num)
    kept = [{STORE_FD_VARIABLE: str(fd)}, *[{}] * (num - 1)]
    shared = ranks.shared_environment()
    return [shared | ranks.rank_environment(rank, port, "a" * 32) | kept[rank] for rank in range(num)], store


def ends(jobs: list[Any]) -> list[tuple[int, str, str]]:
    try:
        outputs = [job.communicate(timeout=120) for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
                job.communicate()
    return [(job.returncode, *output) for job, output in zip(jobs, outputs, strict=True)]


@pytest.mark.wide
def test_our_own_launcher_hands_over_a_listening_socket() -> None:
    environments, store = ours(3)
    jobs = processes(environments, -1, "", 60, fds=(store.fileno(),))
    store.close()
    names = " ".join([socket.gethostname()] * 3)
    said = [f"lmtrain 6.0 {names}\n", "lmtrain 6.0\n", "lmtrain 6.0\n"]
    assert [(code, output) for code, output, _ in ends(jobs)] == [(0, one) for one in said]


@pytest.mark.wide
@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_other_launchers(launcher: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    if launcher == "torchrun":
        environments = [meeting | {"RANK": str(r), "WORLD_SIZE": "2", "LOCAL_RANK": str(r)} for r in range(2)]
    else:
        step = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1"}
        environments = [meeting | step | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(2)]
    jobs = processes(environments, -1, "", 60)
    name = socket.gethostname()
    said = [f"{launcher} 3.0 {name} {name}\n", f"{launcher} 3.0\n"]
    assert [(code, output) for code, output, _ in ends(jobs)] == [(0, one) for one in said]


@pytest.mark.wide
def test_what_a_stranger_wrote_before_the_meeting_is_never_read() -> None:
    """Under the names at which gloo looks for addresses; so it ended with std::bad_alloc."""
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    theirs: Any = PrefixStore("attempt 0", store)
    for rank in range(2):
        theirs.set(f"0//cpu//0/{rank}", b"\xff" * 64)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    meeting |= {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    jobs = processes([meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)], -1, "", 60)
    assert [code for code, _, _ in ends(jobs)] == [0, 0]


# because: on a busy machine two processes may be seconds apart when they meet
@pytest.mark.wide
@pytest.mark.parametrize(
    ("deed", "timeout_s", "reason"), [("die", 60, "peer"), *slow(("hang", 15, "Timed out waiting"))]
)
def test_a_dead_and_a_silent_peer(deed: str, timeout_s: int, reason: str) -> None:
    environments, store = ours(2)
    environments[1] = {**environments[1], "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
    jobs = processes(environments, 1, deed, timeout_s, fds=(store.fileno(),))
    store.close()
    survivor = jobs[0].communicate(timeout=120)
    jobs[1].send_signal(signal.SIGKILL)
    _, said = jobs[1].communicate()
    assert jobs[0].returncode == 76
    assert "NCCL 0\n" in survivor[1], "the run's own watch ends it, and NCCL's does not"
    assert "NCCL 2\n" in said, "unless the user wants it to"
    assert f"rank 0 on {socket.gethostname()} waited for its peers in all_reduce" in survivor[1]
    assert reason in survivor[1]
    assert f"parallel.timeout_s={timeout_s}" in survivor[1]


class Options:
    """Stands in for those of NCCL, which a torch for CPUs has not."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(max_ctas=None)
        self._timeout = timedelta(0)


@pytest.mark.parametrize(("backend", "capped"), [("cpu:gloo,cuda:nccl", True), ("cpu:gloo", False)])
def test_a_group_of_nccl_may_be_capped(monkeypatch: pytest.MonkeyPatch, backend: str, capped: bool) -> None:
    asked: list[Any] = []

    def made(ranks: list[int], **options: Any) -> Any:
        asked.append(options["pg_options"])
        return dist.ProcessGroup(dist.HashStore(), 0, 1)  # type: ignore[attr-defined]

    monkeypatch.setattr(dist, "new_group", made)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    new_group((0, 1), 60.0, 4)
    new_group((0, 1), 60.0)
    with_cap, without = asked
    assert without is None
    assert (with_cap is not None) is capped
    if capped:
        assert (with_cap.config.max_ctas, with_cap._timeout) == (4, timedelta(seconds=65))


END = """
import atexit, os, sys
import torch.distributed as dist
from lmtrain.cli import main as command
from lmtrain.errors import DataError
from lmtrain.runtime.processes import process_group


def app(*given, **named):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    raise how


command.app = app
for how in (DataError("refused"), SystemExit(76), KeyError("failed")):
    if (pid := os.fork()) == 0:
        atexit.register(print, "Python takes down what is left")
        command.main([])
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.wide
def test_a_process_whose_group_is_alive_ends_at_once() -> None:
    """Threads of gloo now and then abort one that Python takes down, and NCCL may wait for a peer that is gone."""
    end = subprocess.run([sys.executable, "-c", END], capture_output=True, text=True, timeout=300)
    assert (end.returncode, end.stdout.split()) == (0, ["65", "76", "1"])
    assert "error: refused" in end.stderr
    assert "KeyError: 'failed'" in end.stderr
