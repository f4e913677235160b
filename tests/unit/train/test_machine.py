"""What the machine lacks for a run is said before the run begins."""

from __future__ import annotations

import dataclasses
import fcntl
import socket
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.disk.tensor_file import RankData
from lmtrain.checkpoint.save.commit import save_checkpoint
from lmtrain.config.compose import compose
from lmtrain.errors import OutputError, StorageError, UsageError
from lmtrain.plan.run_model.checkpoint_size import checkpoint_bytes
from lmtrain.runfolder.names import CHECKPOINTS
from lmtrain.runtime.processes.process import ProcessEnv
from lmtrain.train.before import preflight
from lmtrain.train.before.preflight import check_folder, check_port
from lmtrain.train.config import RunConfig


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return compose(RunConfig, ["data.path=x", "model.vocab_size=1000", "optim=muon"])


def _in(config: RunConfig, folder: Path, **checkpoint: Any) -> RunConfig:
    run = dataclasses.replace(config.run, dir=str(folder))
    return dataclasses.replace(config, run=run, checkpoint=dataclasses.replace(config.checkpoint, **checkpoint))


def test_a_folder_that_cannot_be_made(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("file", "file/below/it"):
        with pytest.raises(OutputError, match=r"^run\.dir=.*is a file.*Choose another one\.$"):
            check_folder(_in(config, tmp_path / name), config.model, lock=True)
    check_folder(_in(config, tmp_path / "new" / "run"), config.model, lock=True)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_another_run_has(config: RunConfig, tmp_path: Path) -> None:
    with open(tmp_path / ".lock", "w") as file:
        file.write("process 7 on n1")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="is in use by process 7 on n1"):
            check_folder(_in(config, tmp_path), config.model, lock=True)
        check_folder(_in(config, tmp_path), config.model, lock=False)
    check_folder(_in(config, tmp_path), config.model, lock=True)


def test_room_for_two_checkpoints(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = checkpoint_bytes(config.model, config.optim.num_slots)
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: 2 * need - 1)
    with pytest.raises(StorageError, match=r"2 checkpoints need .*set checkpoint\.interval_steps=null to save none"):
        check_folder(_in(config, tmp_path), config.model, lock=True)
    for interval in (0, 5000, None):
        check_folder(_in(config, tmp_path, interval_steps=interval), config.model, lock=True)
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: need - 1)
    with pytest.raises(StorageError, match="A checkpoint needs"):
        check_folder(_in(config, tmp_path, interval_steps=0), config.model, lock=True)


@pytest.mark.parametrize("num_there", [1, 2, 3])
def test_a_run_that_goes_on_needs_room_for_one_more_however_many_are_there(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_there: int
) -> None:
    need = checkpoint_bytes(config.model, config.optim.num_slots)
    for step in range(num_there):
        save_checkpoint(tmp_path / CHECKPOINTS, step, RankData([], []), {}, {})
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: need)
    check_folder(_in(config, tmp_path), config.model, lock=True)
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: need - 1)
    with pytest.raises(StorageError, match="A checkpoint needs"):
        check_folder(_in(config, tmp_path), config.model, lock=True)


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    check_port(ProcessEnv())
    check_port(ProcessEnv().as_launcher(2))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        check_port(ProcessEnv(1, 2, 1, "torchrun"))
        with pytest.raises(UsageError, match="is in use by another program"):
            check_port(ProcessEnv(0, 2, 0, "torchrun"))
