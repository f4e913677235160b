"""What surrounds a run misbehaves: clocks, limits, records, folder, ports. Training is the same, or says why not."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lmtrain.observe.metrics import GrowingFile, read_metrics
from lmtrain.train import loop
from lmtrain.train.record import metrics_writer
from lmtrain.train.step import train_step
from tests.cli.harness import Toy, lmtrain, outcome, start

EXACT = ("step", "loss", "grad_norm", "lr", "samples", "tokens", "samples_hash")
SHORT: dict[str, Any] = {"train__steps": 6, "checkpoint__interval_steps": 2}
DAY = timedelta(days=1)


def curve(folder: Path) -> list[tuple[Any, ...]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [tuple(row[key] for key in EXACT) for row in rows if row["event"] == "step"]


@pytest.fixture(scope="module")
def usual(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    folder = tmp_path_factory.mktemp("usual") / "run"
    lmtrain("pretrain", *toy.settings(folder, **SHORT))
    return curve(folder)


@pytest.mark.wide
def test_a_clock_that_is_set_back_and_forth_changes_nothing(
    toy: Toy, usual: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, jumps = time.time, itertools.cycle((0, -1, 0, 1, -2))

    class Jumping(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Jumping:
            return cls.fromtimestamp(real(), tz or UTC) + next(jumps) * DAY

    monkeypatch.setattr(time, "time", lambda: real() + next(jumps) * DAY.total_seconds())
    monkeypatch.setattr(metrics_writer, "datetime", Jumping)
    run = tmp_path / "run"
    fault = {"LMTRAIN_FAULT": "exc:point=step:step=4", "LMTRAIN_ALLOW_FAULTS": "1"}
    lmtrain("pretrain", *toy.settings(run, **SHORT, observe__tensorboard="true"), code=1, env=fault)
    output = lmtrain("pretrain", *toy.settings(run, **SHORT, observe__tensorboard="true"))
    assert "at step 4" in output
    assert curve(run) == usual
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["event"] == "step"]
    assert len({row["time"][:10] for row in rows}) > 1  # the clock did jump
    assert all(row[key] is None or row[key] >= 0 for row in rows for key in ("tokens_per_s", "elapsed_s", "eta_s"))


@pytest.mark.wide
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_64_open_files_are_enough(toy: Toy, usual: list[tuple[Any, ...]], tmp_path: Path, asynchronous: str) -> None:
    run = tmp_path / "run"
    words = toy.settings(run, **SHORT, checkpoint__asynchronous=asynchronous, observe__tensorboard="true")
    done = subprocess.run(
        [sys.executable, "-m", "lmtrain", "pretrain", *words], capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert curve(run) == usual


@pytest.mark.wide
def test_a_tensorboard_that_fails_at_every_write_leaves_the_curve_alone(
    toy: Toy, usual: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = GrowingFile._write

    def failing(file: GrowingFile, data: bytes) -> None:
        if "tfevents" in file.path.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(file, data)

    monkeypatch.setattr(GrowingFile, "_write", failing)
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run", **SHORT, observe__tensorboard="true"))
    assert "tfevents.000000.lmtrain failed: " in output
    assert "Training goes on" in output
    assert curve(tmp_path / "run") == usual


@pytest.mark.wide
def test_a_folder_that_is_taken_away_is_named(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes to nothing worse than saves that fail, of which the last one is the run's failure."""

    def step_then_gone(*arguments: Any) -> Any:
        shutil.rmtree(tmp_path / "disk", ignore_errors=True)
        return train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", step_then_gone)
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    output = lmtrain("pretrain", *toy.settings(tmp_path / "run", **SHORT), code=73)
    assert "Training goes on" in output
    assert f"error: Saving a checkpoint in {tmp_path / 'run'}" in output


@pytest.mark.wide
def test_a_port_that_is_taken_is_named(toy: Toy, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words = toy.settings(tmp_path / "run", **SHORT, parallel__tp=2, parallel__timeout_s=30)
        code, output = outcome("pretrain", *words, env=env)
    assert code == 2, output
    assert f"Port {port} cannot be opened: it is in use by another program. Set MASTER_PORT to a free port." in output


@pytest.mark.slow
def test_two_runs_of_a_node_begin_twenty_times_of_twenty(toy: Toy, tmp_path: Path) -> None:
    for turn in range(20):
        words = [
            toy.settings(tmp_path / f"{turn}{name}", train__steps=1, schedule__warmup_steps=0, parallel__tp=2)
            for name in "ab"
        ]
        pair = [start("pretrain", "--nproc", 2, *one) for one in words]
        outputs = [one.communicate(timeout=600)[0] for one in pair]
        assert [one.returncode for one in pair] == [0, 0], outputs
