"""The writer: copies are taken at once, writing goes on behind, errors surface, and only one save is in flight."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.checkpoint.disk.safetensors_file import RankData
from lmtrain.checkpoint.find_and_prune import list_checkpoints
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.checkpoint.save import background_writer as writer_module
from lmtrain.checkpoint.save import commit as commit_module
from lmtrain.checkpoint.save.background_writer import CheckpointWriter
from lmtrain.checkpoint.save.commit import save_checkpoint
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.errors import OutputError, StorageError
from lmtrain.layout import Piece
from lmtrain.runfolder.file_names import step_folder_name
from lmtrain.runtime.files.atomic_files import folder_lock
from lmtrain.runtime.processes import fault_injection
from lmtrain.runtime.processes.fault_injection import Fault


def pieces(value: float) -> list[Piece]:
    block = torch.full((50, 3), value)
    return [Piece("w", (50, 3), (0, 0), block), Piece("n", (), (), torch.tensor(int(value)))]


def steps(folder: Path) -> list[int]:
    return [CheckpointReader(path).step for path in list_checkpoints(folder)]


class Gate:
    """Holds the writing thread at its door until told to let it through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.num_inside = self.most_inside = 0
        self._original = save_checkpoint
        monkeypatch.setattr(writer_module, "save_checkpoint", self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        self.reached.set()
        assert self.open.wait(30)
        result = self._original(*args, **options)
        self.num_inside -= 1
        return result


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saves_and_keeps_the_last(tmp_path: Path, asynchronous: bool) -> None:
    with CheckpointWriter(tmp_path, keep_last=2, asynchronous=asynchronous) as writer:
        for step in (1, 2, 3, 4):
            writer.save(step, pieces(step), {"step": step}, {"tokenizer.json": b"{}"})
    assert steps(tmp_path) == [3, 4]
    for path in list_checkpoints(tmp_path):
        reader = CheckpointReader(path)
        assert Contents(reader.path).find_damage() == []
        assert (reader.read("w") == reader.step).all()
    facts = writer.last
    assert facts is not None
    assert (facts.step, facts.path) == (4, tmp_path / "step_00000004")
    assert facts.num_bytes == sum(file.stat().st_size for file in facts.path.iterdir())
    assert facts.write_s > 0
    assert facts.stall_s > 0


def test_tensors_of_many_blocks_that_begin_anywhere_in_one(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = [torch.randn(size, generator=generator) for size in (1_500_001, 5, 700_000, 1_345_678)]
    many = [Piece(f"w{i}", tuple(b.shape), (0,), b) for i, b in enumerate(blocks)]
    with CheckpointWriter(tmp_path, keep_last=1, asynchronous=True) as writer:
        for step in (1, 2):
            writer.save(step, many, {"step": step}, {})
    reader = CheckpointReader(tmp_path / "step_00000002")
    assert Contents(reader.path).find_damage() == []
    for piece, block in zip(many, blocks, strict=True):
        assert torch.equal(reader.read(piece.name), block)


def test_every_nth_and_chosen_steps_stay_for_good(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep_last=1, asynchronous=True, keep_every_steps=4, keep_steps=(6,)) as writer:
        for step in range(2, 13, 2):
            writer.save(step, pieces(step), {"step": step}, {})
    assert steps(tmp_path) == [4, 6, 8, 12]


def test_what_does_not_read_back_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that loses a bit fails the save; the checkpoint before it stays, and the next save is tried."""
    writer = CheckpointWriter(tmp_path, keep_last=1, asynchronous=True, verify_after_save=True)
    writer.save(1, pieces(1), {"step": 1}, {})
    writer.wait()

    def lose_a_bit(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[-2] ^= 32
        path.write_bytes(content)

    with monkeypatch.context() as patch:
        patch.setattr(commit_module, "drop_from_page_cache", lose_a_bit)
        writer.save(2, pieces(2), {"step": 2}, {})
        with pytest.raises(StorageError, match=r"differs from what was written to it: .*safetensors is damaged"):
            writer.wait()
    assert os.listdir(tmp_path) == ["step_00000001"]
    writer.save(3, pieces(3), {"step": 3}, {})
    writer.wait()
    assert steps(tmp_path) == [3]


def test_the_run_may_change_everything_once_save_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    live, state, files = pieces(1.0), {"list": [1]}, {"a.json": b"1"}
    writer = CheckpointWriter(tmp_path, keep_last=2, asynchronous=True)
    writer.save(1, live, state, files)
    assert gate.reached.wait(30)
    assert writer.last is None
    assert not (tmp_path / "step_00000001").exists()
    for piece in live:
        piece.block.zero_()
    state["list"].append(2)
    files.clear()
    gate.open.set()
    writer.wait()
    reader = CheckpointReader(tmp_path / "step_00000001")
    assert (reader.read("w") == 1).all()
    assert reader.state == {"list": [1]}
    assert reader.read_file("a.json") == b"1"


def test_a_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves never pile up: there is one buffer, and it is written to only when what it held is on disk."""
    gate, found = Gate(monkeypatch), []
    writer = CheckpointWriter(tmp_path, keep_last=9, asynchronous=True)
    capture = writer._memory.capture

    def watched(given: Sequence[Piece]) -> RankData:
        found.append([step for step in range(1, 9) if (tmp_path / step_folder_name(step)).exists()])
        return capture(given)

    monkeypatch.setattr(writer._memory, "capture", watched)
    writer.save(1, pieces(1), {}, {})
    chunks = list(writer._memory._chunks)

    def three_more() -> None:
        for step in (2, 3, 4):
            writer.save(step, pieces(step), {}, {})

    second = threading.Thread(target=three_more)
    second.start()
    assert gate.reached.wait(30)
    assert not (tmp_path / "step_00000002").exists()
    gate.open.set()
    second.join()
    writer.wait()
    assert gate.most_inside == 1
    assert found == [[], [1], [1, 2], [1, 2, 3]]
    assert [id(chunk) for chunk in writer._memory._chunks] == [id(chunk) for chunk in chunks]
    for step in (1, 2, 3, 4):
        assert (CheckpointReader(tmp_path / step_folder_name(step)).read("w") == step).all()


class Clock:
    """Stands still but for saves, each of which takes 100 s and ends only once somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.is_armed, self.asked = 0.0, False, threading.Event()
        self._original = save_checkpoint
        monkeypatch.setattr(writer_module, "time", self)
        monkeypatch.setattr(writer_module, "save_checkpoint", self._save)

    def monotonic(self) -> float:
        if self.is_armed:
            self.asked.set()
        return self.now

    def _save(self, *args: Any, **options: Any) -> Any:
        assert self.asked.wait(30)
        self.now += 100.0
        return self._original(*args, **options)


def test_waiting_for_the_save_before_is_part_of_the_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the loop waits by itself before it saves, to tell of the last one."""
    clock = Clock(monkeypatch)
    writer = CheckpointWriter(tmp_path, keep_last=9, asynchronous=True)
    pauses = []
    for step in (1, 2):
        clock.is_armed = False
        clock.asked.clear()
        writer.save(step, pieces(step), {}, {})
        clock.is_armed = True
        writer.wait()
        assert writer.last is not None
        assert writer.last.write_s == 100.0
        assert writer.last.bytes_per_s == writer.last.num_bytes / 100.0
        pauses.append(writer.last.stall_s)
    assert pauses == [0.0, 100.0]


def test_memory_made_in_advance_is_what_the_first_save_uses(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep_last=1, asynchronous=True)
    writer.reserve(pieces(1))
    writer.wait()
    (chunk,) = writer._memory._chunks
    writer.save(1, pieces(1), {}, {})
    writer.wait()
    assert [id(found) for found in writer._memory._chunks] == [id(chunk)]
    assert (CheckpointReader(tmp_path / "step_00000001").read("w") == 1).all()


@pytest.mark.parametrize("surfaces_in", ["wait", "save"])
def test_an_error_behind_surfaces_once_and_training_may_go_on(tmp_path: Path, surfaces_in: str) -> None:
    writer = CheckpointWriter(tmp_path, keep_last=2, asynchronous=True)
    writer.save(1, pieces(1), {}, {})
    writer.wait()
    fault_injection.arm(Fault("enospc", "ckpt.before_rename"))
    writer.save(2, pieces(2), {}, {})
    with pytest.raises(StorageError, match="the disk is full"):
        writer.save(3, pieces(3), {}, {}) if surfaces_in == "save" else writer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert writer.last is not None
    assert writer.last.step == 1
    writer.save(3, pieces(3), {}, {})
    writer.wait()
    assert steps(tmp_path) == [1, 3]


@pytest.mark.parametrize(("news", "surfaces"), [(KeyError("the news"), KeyError), (None, StorageError)])
def test_what_ended_the_run_is_not_hidden_by_a_save_that_failed_too(
    tmp_path: Path, news: Exception | None, surfaces: type[Exception]
) -> None:
    def run() -> None:
        with CheckpointWriter(tmp_path, keep_last=2, asynchronous=True) as writer:
            writer.save(1, pieces(1), {}, {})
            if news is not None:
                raise news

    fault_injection.arm(Fault("enospc", "ckpt.before_rename"))
    with pytest.raises(surfaces):
        run()


def test_a_bug_behind_surfaces_as_itself(tmp_path: Path) -> None:
    fault_injection.arm(Fault("exc", "ckpt.mid_write", count=2))
    writer = CheckpointWriter(tmp_path, keep_last=2, asynchronous=True)
    writer.save(1, pieces(1), {}, {})
    with pytest.raises(RuntimeError, match="fault at ckpt"):
        writer.wait()
    assert list(tmp_path.iterdir()) == []


def test_the_same_step_is_saved_once_by_one_writer_and_replaced_by_another(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep_last=2, asynchronous=True) as writer:
        writer.save(5, pieces(1), {}, {})
        writer.save(5, pieces(2), {}, {})
    assert (CheckpointReader(tmp_path / "step_00000005").read("w") == 1).all()
    with CheckpointWriter(tmp_path, keep_last=2, asynchronous=True) as writer:
        writer.save(5, pieces(3), {}, {})
    assert (CheckpointReader(tmp_path / "step_00000005").read("w") == 3).all()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path: Path) -> None:
    for step in (8, 9, 2, 3):
        with CheckpointWriter(tmp_path, keep_last=2, asynchronous=True) as writer:
            writer.save(step, pieces(step), {}, {})
        assert step in steps(tmp_path)
    assert steps(tmp_path) == [3, 8, 9]


def test_state_that_is_no_json_is_refused_in_the_loop(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep_last=2, asynchronous=True)
    for wrong in ({"x": float("nan")}, {"x": torch.zeros(1)}):
        with pytest.raises((ValueError, TypeError)):
            writer.save(1, pieces(1), wrong, {})
    writer.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from lmtrain.runtime.files.atomic_files import folder_lock\n"
    script += "with folder_lock(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "mine\n"
        with pytest.raises(OutputError, match=rf"is in use by process {owner.pid} on"), folder_lock(tmp_path):
            pass
        owner.kill()
    with folder_lock(tmp_path):
        pass
