"""Where the processes of a run meet: an address that leads nowhere ends in a message; nobody listens to the network."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.harness import ROOT, Toy, start
from tests.cli.test_launch import LONG, run_until_step

LOOPBACK = {"0100007F", "0" * 16 + "FFFF0000" + "0100007F", "0" * 24 + "01000000"}
LISTENS = "0A"
PEER = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def test_a_port_that_is_none_is_refused_before_anything(toy: Toy, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "lmtrain", "pretrain", *toy.settings(tmp_path / "run", x=1)],
        env={**os.environ, **PEER, "MASTER_PORT": "99999"}, capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2
    (said,) = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert said == "error: MASTER_PORT=99999 is not a port. Set it to a free port from 1024 to 65535."
    assert "| omegaconf" not in done.stderr


@pytest.mark.wide
def test_a_listener_that_does_not_answer_ends_in_time(toy: Toy, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = toy.settings(tmp_path / "run", parallel__dp_shard=2, parallel__timeout_s=3)
        began = time.monotonic()
        process = start("pretrain", *settings, env={**PEER, "MASTER_PORT": str(silent.getsockname()[1])})
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 76, output
    assert time.monotonic() - began < 60
    assert "another program listens there and does not answer" in output
    assert "parallel.timeout_s=3" in output


@pytest.mark.wide
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc")
def test_processes_of_one_machine_listen_on_the_loopback_alone(toy: Toy, tmp_path: Path) -> None:
    process = run_until_step(toy, tmp_path / "run", 2, **LONG)
    processes = [str(process.pid), *started_by(str(process.pid))]
    found = [address for pid in processes for address in listening(pid)]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    assert len(processes) == 6  # the launcher and its guardian, two ranks, a companion for each
    assert len(found) >= 4  # the store, each rank for the other, the companion of rank 0 for the other one
    assert set(found) <= LOOPBACK


def started_by(pid: str) -> list[str]:
    children = [one for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]
    return children + [one for child in children for one in started_by(child)]


def listening(pid: str) -> list[str]:
    """The addresses at which a process listens, as the system's own books have them."""
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in links]
