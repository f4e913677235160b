"""What a run does when files that people and tools read cannot be written: the weights go on, and it says what is lost.

The refusals are the system's own: a limit of file size that lies below what is there, and /dev/full.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmtrain.observe.metrics import read_metrics
from tests.cli.harness import Toy, lmtrain, start
from tests.limited import limited
from tests.marks import wide

MOST = 1 << 20
ONE = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def _fill(folder: Path) -> None:
    """Records that are at their limit already, which checkpoints are far from."""
    (folder / "log.txt").write_bytes(b"x" * MOST + b"\n")
    row = {"event": "start", "step": 0, "attempt": 1, "filled": "x" * (MOST // 8)}
    (folder / "metrics.jsonl").write_text((json.dumps(row) + "\n") * 8)


def _steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "step"]


def test_a_run_whose_records_cannot_be_written_trains_to_its_end(toy: Toy, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "big_disk").mkdir()
    run.symlink_to(tmp_path / "big_disk")  # as a user may well have it
    _fill(run)
    with limited(resource.RLIMIT_FSIZE, MOST):
        output = lmtrain("pretrain", *toy.settings(run, train__steps=6))
    assert "step 6/6" in output
    assert output.count("metrics.jsonl failed: a file may have 1.0 MiB here") == 1
    assert output.count("log.txt failed: a file may have 1.0 MiB here") == 1
    assert "Training goes on" in output
    assert "The last 10 rows of" in output  # start, six steps, two saves, stop
    assert json.loads((run / "stop.json").read_text())["cause"] == "done"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]

    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "st')  # what a kill leaves
    output = lmtrain("pretrain", *toy.settings(run, train__steps=8))
    assert "lost" not in output
    assert _steps(run) == [7, 8]
    assert (run / "log.txt").read_text().splitlines()[-1].split("  ")[1].startswith("saved step 8")


@pytest.mark.parametrize("name", [".lock", *wide("log.txt", "config.json", "metrics.jsonl")])
def test_a_run_writes_through_no_link(toy: Toy, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "precious").write_text("mine")
    (run / name).symlink_to(tmp_path / "precious")
    output = lmtrain("pretrain", *toy.settings(run, train__steps=3), code=73)
    assert f"run/{name} is a symbolic link, and nothing is written through links. Remove the link." in output
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.wide
def test_room_that_comes_back_is_used_and_a_save_without_room_is_the_cause(toy: Toy, tmp_path: Path) -> None:
    """A run of its own, whose limits change while it runs: nothing may grow, then all may, then nothing again."""
    run = tmp_path / "run"
    process = start("pretrain", *toy.settings(run, train__steps=100_000, checkpoint__interval_steps=0))
    assert process.stdout is not None
    _read_until(process, "step ")
    _allow(process, 1)
    _read_until(process, "metrics.jsonl failed: a file may have 1 B here")
    _read_until(process, "step ")
    _allow(process, resource.RLIM_INFINITY)
    _read_until(process, "metrics.jsonl works again;")
    _read_until(process, "step ")
    _allow(process, 1)
    process.send_signal(signal.SIGTERM)
    rest = process.communicate()[0]
    assert process.returncode == 74, rest
    cause, then = rest[rest.index("error: ") :].splitlines()
    assert "a file may have 1 B here" in cause
    assert then.startswith("The reason could not be written to stop.json: Writing ")
    log = (run / "log.txt").read_text()
    assert "lines are missing here, which could not be written" in log
    [lost] = map(int, re.findall(r"metrics.jsonl works again; (\d+) rows were lost", log))
    steps = _steps(run)
    assert steps[-1] - len(steps) >= lost >= 1
    assert "SIGTERM: stopping after this step" in rest


@pytest.mark.wide
def test_an_output_that_nobody_takes_ends_no_run(toy: Toy, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lmtrain", "pretrain", *toy.settings(tmp_path / "run", train__steps=6)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env={**os.environ, **ONE})
    assert done.returncode == 0, done.stderr
    assert _steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    reader, writer = os.pipe()
    os.close(reader)
    command[4:] = toy.settings(tmp_path / "run", train__steps=8)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env={**os.environ, **ONE})
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert _steps(tmp_path / "run")[-1] == 8


def _allow(process: subprocess.Popen[str], most_bytes: int) -> None:
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most_bytes, hard))


def _read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if words in line:
            return
    raise AssertionError(f"never said {words!r}:\n{''.join(seen)}")


def test_a_run_whose_saves_keep_failing_ends_and_goes_on_when_there_is_room(toy: Toy, tmp_path: Path) -> None:
    """Two failures are survived, also twice; the third in a row is the run's."""
    settings = toy.settings(tmp_path / "run", checkpoint__interval_steps=2, train__steps=16)
    faults = ",".join(f"enospc:point=ckpt.begin:count={count}" for count in (1, 2, 4, 5, 6))
    output = lmtrain("pretrain", *settings, code=74, env={"LMTRAIN_FAULT": faults, "LMTRAIN_ALLOW_FAULTS": "1"})
    assert output.count("Training goes on.") == 4
    assert "error: The run stops, since 3 checkpoints in a row could not be saved; the last error: Saving" in output
    stop = json.loads((tmp_path / "run" / "stop.json").read_text())
    assert (stop["exit_code"], stop["requeue"]) == (74, False)
    assert stop["resume"].endswith("step_00000006")
    assert "continuing from" in lmtrain("pretrain", *settings)
    assert _steps(tmp_path / "run")[-10:] == [*range(7, 17)]
