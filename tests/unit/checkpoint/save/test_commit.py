"""All or nothing: a kill at every point and the failure of every system call leave a whole checkpoint behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.checkpoint.disk.safetensors_file import PieceSpec, merge_pieces, piece_entries
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box
from lmtrain.checkpoint.find_and_prune import clear_leftovers, latest_checkpoint, list_checkpoints, prune_checkpoints
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.checkpoint.save.commit import save_checkpoint
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.errors import CheckpointError, LmtrainError, OutputError, StorageError
from lmtrain.layout import Piece
from lmtrain.runtime.processes import fault_injection
from lmtrain.runtime.processes.fault_injection import Fault
from tests.marks import wide
from tests.unit.checkpoint.arrays import rank_data

SCRIPT = """
import os, sys
from pathlib import Path
import numpy as np
from lmtrain.checkpoint.save.commit import save_checkpoint
from lmtrain.checkpoint.find_and_prune import prune_checkpoints
from lmtrain.layout import Piece
from lmtrain.runtime.processes.fault_injection import arm, parse_fault
from tests.unit.checkpoint.arrays import rank_data
block = np.full((300, 7), 2.0, np.float32)
data = rank_data([Piece("w", block.shape, (0, 0), block)])
assert "torch" not in sys.modules
for folder, step, fault in zip(*[iter(sys.argv[1:])] * 3):
    if not (child := os.fork()):
        arm(parse_fault(fault))
        save_checkpoint(Path(folder), int(step), data, {"value": 2.0}, {"tokenizer.json": b"{}"})
        prune_checkpoints(Path(folder), 1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
KILLS = [
    ("ckpt.begin", 2, 1.0),
    ("ckpt.mid_write", 2, 1.0),
    ("ckpt.mid_write:count=2", 2, 1.0),
    ("ckpt.before_manifest", 2, 1.0),
    ("ckpt.before_rename", 2, 1.0),
    ("ckpt.after_rename", 2, 2.0),
    ("ckpt.prune", 2, 2.0),
    ("ckpt.before_rename", 1, 1.0),
    ("ckpt.mid_replace", 1, 2.0),
    ("ckpt.after_rename", 1, 2.0),
]


def save(folder: Path, step: int, value: float) -> None:
    block = np.full((300, 7), value, np.float32)
    data = rank_data([Piece("w", block.shape, (0, 0), block)])
    save_checkpoint(folder, step, data, {"value": value}, {"tokenizer.json": b"{}"})


def content(path: Path) -> float:
    """The value a checkpoint was made with, after a check of every byte."""
    reader = CheckpointReader(path)
    assert Contents(reader.path).find_damage() == []
    value = float(reader.state["value"])
    assert (reader.read("w") == value).all()
    assert reader.read_file("tokenizer.json") == b"{}"
    return value


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if "." in path.name]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """Folders in which step 1 holds 1.0, and in which a process that saved `step` with 2.0 has been killed."""
    folders = {(fault, step): tmp_path_factory.mktemp("killed") for fault, step, _ in KILLS}
    for folder in folders.values():
        save(folder, 1, 1.0)
    words = [word for (fault, step), folder in folders.items() for word in (folder, step, f"kill:point={fault}")]
    ran = subprocess.run([sys.executable, "-c", SCRIPT, *map(str, words)], check=True, capture_output=True, text=True)
    assert ran.stdout == f"{-signal.SIGKILL}\n" * len(KILLS)
    return folders


@pytest.mark.parametrize(("fault", "step", "expected"), KILLS)
def test_a_kill_at_any_point_leaves_a_whole_checkpoint(
    killed: dict[tuple[str, int], Path], fault: str, step: int, expected: float
) -> None:
    """The next process cleans and finishes."""
    folder = killed[fault, step]
    newest = latest_checkpoint(folder)
    assert newest is not None
    assert content(newest) == expected
    clear_leftovers(folder)
    assert leftovers(folder) == []
    newest = latest_checkpoint(folder)
    assert newest is not None
    assert content(newest) == expected
    save(folder, 3, 3.0)
    prune_checkpoints(folder, 1)
    assert [content(path) for path in list_checkpoints(folder)] == [3.0]
    assert leftovers(folder) == []


CALLS = ("pwrite", "fsync", "rename", "open", "mkdir", "rmdir", "unlink", "pread", "scandir")


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, doomed: Callable[[int], bool]) -> Iterator[list[str]]:
    """Every call of these functions of `os` is counted, and those that are doomed find the disk full."""
    made: list[str] = []

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            if doomed(len(made)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield made


def every_call(folder: Path, monkeypatch: pytest.MonkeyPatch, step: int, persistent: bool) -> Iterator[tuple[int, str]]:
    """Save and prune again and again, each time with the next call failing, until a save meets no failure."""
    whole = folder.with_name("whole")
    save(whole, 1, 1.0)
    for n in range(1, 1000):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        with failing(monkeypatch, lambda made, n=n: made >= n if persistent else made == n) as made:  # type: ignore[misc]
            try:
                save(folder, step, 2.0)
                prune_checkpoints(folder, 1)
                error = None
            except LmtrainError as raised:
                error = raised
        if len(made) < n:
            assert error is None
            return
        if error is not None:
            assert isinstance(error, StorageError)
            assert str(folder) in str(error)
        yield n, made[n - 1]
    raise AssertionError("the saves never came to an end")


@pytest.mark.parametrize(
    ("step", "persistent", "exchanges"),
    [(1, True, True), (2, False, True), *wide((1, False, True), (2, True, True), (1, True, False), (1, False, False))],
)
def test_the_failure_of_any_system_call_never_makes_a_partial_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, persistent: bool, exchanges: bool
) -> None:
    if not exchanges:  # as on some network file systems
        monkeypatch.setattr("lmtrain.runtime.files.atomic_files.exchange", lambda *_: False)
    folder = tmp_path / "checkpoints"
    failed: set[str] = set()
    for _, name in every_call(folder, monkeypatch, step, persistent):
        failed.add(name)
        if not persistent and content(list_checkpoints(folder)[-1]) == 1.0:
            assert leftovers(folder) == []
        clear_leftovers(folder)
        assert leftovers(folder) == []
        assert {content(path) for path in list_checkpoints(folder)} in ({1.0}, {2.0}, {1.0, 2.0})
    assert {"pwrite", "fsync", "rename", "mkdir", "open"} <= failed


def test_too_little_room_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtrain.checkpoint.find_and_prune.free_bytes", lambda path: 1 << 20)
    with pytest.raises(StorageError, match=r"checkpoints needs 1\.0 MiB, but the disk has only 1\.0 MiB free"):
        save(tmp_path / "checkpoints", 1, 1.0)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_full_disk_names_path_need_and_room(tmp_path: Path) -> None:
    fault_injection.arm(Fault("enospc", "ckpt.before_manifest"))
    with pytest.raises(StorageError, match=r"checkpoints failed: the disk is full \(1\.0 MiB needed, .* free\)"):
        save(tmp_path / "checkpoints", 1, 1.0)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_folder_that_may_not_be_made_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file"):
        save(tmp_path / "file" / "checkpoints", 1, 1.0)


@pytest.mark.parametrize("name", ["../x", "a/b", ".x", "manifest.json", "rank_00000.safetensors", ""])
def test_names_of_extra_files_are_checked(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be the name"):
        save_checkpoint(tmp_path, 1, rank_data([]), {}, {name: b""})
    assert list(tmp_path.iterdir()) == []


def test_pieces_that_do_not_make_a_tensor_are_refused(tmp_path: Path) -> None:
    half = Piece("w", (4, 2), (0, 0), np.zeros((2, 2), np.float32))
    with pytest.raises(CheckpointError, match=r"w cannot be saved: the pieces hold 4 of its 8 elements"):
        save_checkpoint(tmp_path, 1, rank_data([half]), {}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"dtype": "F64"}, "disagree about the tensor w: F32"), ({"global_shape": (4, 3)}, r"\[4, 2\] and F32 \[4, 3\]"),
     ({"name": "v"}, "tensor w cannot be saved"), ({"box": Box((1, 0), (2, 2))}, "w cannot be saved"),
     ({"box": Box((2, 0), (1, 2))}, "hold 6 of its 8"), ({"box": Box((3, 0), (2, 2))}, "w cannot be saved")],
    ids=str,
)  # fmt: skip
def test_processes_that_disagree_about_a_tensor_are_refused(changed: dict[str, Any], says: str) -> None:
    specs = [PieceSpec("w", "F32", (4, 2), Box((row, 0), (2, 2))) for row in (0, 2)]
    merge_pieces([piece_entries("", [spec]) for spec in specs])
    with pytest.raises(CheckpointError, match=says):
        merge_pieces([piece_entries("", [specs[0]]), piece_entries("", [replace(specs[1], **changed)])])
