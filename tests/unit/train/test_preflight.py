"""A run is refused before it begins if the machine lacks something."""

from __future__ import annotations

import dataclasses
import fcntl
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lmtrain.checkpoint.disk.safetensors_file import PieceSpec, RankData
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box
from lmtrain.checkpoint.find_and_prune import prune_checkpoints
from lmtrain.checkpoint.save.commit import save_checkpoint
from lmtrain.checkpoint.weight_ema_settings import WeightAverageSettings
from lmtrain.config.compose_run_settings import compose
from lmtrain.errors import OutputError, StorageError, UsageError
from lmtrain.models.model_settings import unpadded_shapes
from lmtrain.runfolder.file_names import CHECKPOINTS
from lmtrain.runtime.processes.process_environment import ProcessEnv
from lmtrain.tokenizer.train import train_wordpiece
from lmtrain.train.run_config import RunConfig
from lmtrain.train.startup_checks import preflight
from lmtrain.train.startup_checks.check_machine_and_processes import check_port
from lmtrain.train.startup_checks.preflight import check_checkpoint_size, check_run_folder

TOKENIZER = train_wordpiece(["a cat sat on a mat"], 40, lowercase=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of so many bytes of its own, and a new folder on it."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        disk = tmp_path / f"disk_{len(mounted)}"
        disk.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
        if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("mounting a file system is not allowed")
        mounted.append(disk)
        return disk / "run"

    yield mount
    for disk in mounted:
        subprocess.run(["umount", disk], check=True)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return compose(RunConfig, ["data.path=x", "model.vocab_size=1000", "optim=muon"])


def _in(config: RunConfig, folder: Path, **checkpoint: Any) -> RunConfig:
    run = dataclasses.replace(config.run, dir=str(folder))
    return dataclasses.replace(config, run=run, checkpoint=dataclasses.replace(config.checkpoint, **checkpoint))


def test_a_folder_that_cannot_be_made(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("file", "file/below/it"):
        with pytest.raises(OutputError, match=r"^run\.dir=.*is a file.*Choose another folder\.$"):
            check_run_folder(_in(config, tmp_path / name), config.model, TOKENIZER, check_lock=True)
    check_run_folder(_in(config, tmp_path / "new" / "run"), config.model, TOKENIZER, check_lock=True)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_another_run_has(config: RunConfig, tmp_path: Path) -> None:
    with open(tmp_path / ".lock", "w") as file:
        file.write("process 7 on n1")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="is in use by process 7 on n1"):
            check_run_folder(_in(config, tmp_path), config.model, TOKENIZER, check_lock=True)
        check_run_folder(_in(config, tmp_path), config.model, TOKENIZER, check_lock=False)
    check_run_folder(_in(config, tmp_path), config.model, TOKENIZER, check_lock=True)


def _data(config: RunConfig) -> RankData:
    """All that one process would save."""
    slots, specs = config.optim.num_slots, []
    for name, shape in unpadded_shapes(config.model).items():
        names = [f"model.{name}", *(f"optim.exp_avg{n}.{name}" for n in range(slots(name, shape)))]
        specs += [PieceSpec(one, "F32", shape, Box((0,) * len(shape), shape)) for one in names]
    return RankData(specs, [memoryview(bytes(spec.num_bytes)) for spec in specs])


def _check(config: RunConfig) -> list[str]:
    return check_run_folder(config, config.model, TOKENIZER, check_lock=True)


def _save_all(config: RunConfig) -> int:
    """Save every 500 steps, as a run does, and return how many of the saves the disk takes."""
    folder, keep = Path(config.run.dir) / CHECKPOINTS, config.checkpoint.keep_last
    with suppress(StorageError):
        for step in range(500, config.total_steps + 1, 500):
            save_checkpoint(folder, step, _data(config), {}, {"tokenizer.json": TOKENIZER.to_bytes()})
            prune_checkpoints(folder, keep)
        return config.total_steps // 500
    return step // 500 - 1


def test_a_small_disk_takes_all_saves_or_it_is_said_before_the_first_step(
    config: RunConfig, tmp_path: Path, small_disk: Callable[[int], Path]
) -> None:
    size = save_checkpoint(tmp_path, 1, _data(config), {}, {"tokenizer.json": TOKENIZER.to_bytes()})[1]
    asked = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=2500))
    for room, advice in (
        (size - (1 << 19), r": 3 checkpoints, .* each, and .* choose another run\.dir, or save none "),
        (size + (3 << 20), r"set checkpoint\.interval_steps=0 checkpoint\.interval_s=null to save only at the end, or"),
        (2 * size + (4 << 20), r"set checkpoint\.keep_last=1, or save none "),
    ):
        run = _in(asked, small_disk(room))
        with pytest.raises(StorageError, match=advice):
            _check(run)
        assert _save_all(run) < 5
    for keep_last in (1, 2):
        run = _in(asked, small_disk((keep_last + 1) * (size + (1 << 20)) + (2 << 20)), keep_last=keep_last)
        assert _check(run) == []
        assert _save_all(run) == 5
    with pytest.raises(StorageError, match=r"is too full: a checkpoint and the run's records need .*"):
        _check(_in(asked, small_disk(size - (1 << 19)), interval_steps=0))


def test_an_average_of_the_weights_takes_room_on_the_disk(config: RunConfig, tmp_path: Path) -> None:
    kept = _in(config, tmp_path, ema=WeightAverageSettings(decay=0.9))
    more = check_checkpoint_size(kept, kept.model) - check_checkpoint_size(config, config.model)
    assert more == pytest.approx(4 * config.model.num_parameters, rel=0.05)


def test_what_may_lack_room_later_is_told(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = check_checkpoint_size(config, config.model) + len(TOKENIZER.to_bytes())
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: 4 * size)
    [told] = _check(_in(config, tmp_path, interval_steps=100, keep_every_steps=200))
    assert "may become too full: 8 checkpoints, " in told
    assert "(checkpoint.keep_last=2, checkpoint.keep_every_steps=200, checkpoint.interval_s=600.0)" in told
    [told] = _check(_in(config, tmp_path, interval_steps=0, interval_s=60.0, keep_last=5))
    assert "(checkpoint.keep_last=5, checkpoint.interval_s=60.0)" in told
    assert _check(_in(config, tmp_path, interval_steps=None)) == []


def test_the_ends_of_stages_take_room_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [f"stages.{name}.steps=100" for name in ("a", "b", "c", "d")]
    config = compose(RunConfig, ["data.path=x", "model.vocab_size=1000", *stages])
    size = check_checkpoint_size(config, config.model) + len(TOKENIZER.to_bytes())
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: 5 * size)
    [told] = _check(_in(config, tmp_path, interval_steps=50, interval_s=None))
    assert "may become too full: 6 checkpoints, " in told  # 3 ends, the last 2, and the one that is being written
    assert "(checkpoint.keep_last=2, and the end of each stage)" in told
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: size)
    with pytest.raises(StorageError, match=r"or choose another run\.dir\.$"):  # a run with stages has to save
        _check(_in(config, tmp_path, interval_steps=50))


@pytest.mark.parametrize("num_there", [1, 2, 3])
def test_a_run_that_goes_on_needs_room_for_one_more_however_many_are_there(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_there: int
) -> None:
    need = check_checkpoint_size(config, config.model) + len(TOKENIZER.to_bytes())
    for step in range(num_there):
        save_checkpoint(tmp_path / CHECKPOINTS, step, RankData([], []), {}, {})
    run = _in(config, tmp_path, keep_last=1)
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: need + (2 << 20))
    _check(run)
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: need - 1)
    with pytest.raises(StorageError, match=r"is too full: a checkpoint and the run's records need"):
        _check(run)


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    check_port(ProcessEnv())
    check_port(ProcessEnv().as_launcher(2))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        check_port(ProcessEnv(1, 2, 1, "torchrun"))
        with pytest.raises(UsageError, match="is in use by another program"):
            check_port(ProcessEnv(0, 2, 0, "torchrun"))
