"""Several processes save one checkpoint, or none of them does: writers in threads that talk through one object."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.checkpoint.find_and_prune import leftover_numbers, leftover_path, new_leftover_path
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.checkpoint.save.background_writer import CheckpointWriter
from lmtrain.checkpoint.save.commit import (
    RankRecord,
    collect_part_manifests,
    encode_part_manifest,
    part_manifest_name,
    read_part_manifest,
    save_checkpoint,
    write_rank,
)
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.errors import CheckpointError, LmtrainError, NonFiniteLossError, OutputError, StorageError
from lmtrain.layout import Piece
from lmtrain.runtime.processes import fault_injection
from lmtrain.runtime.processes.fault_injection import Fault
from lmtrain.runtime.processes.succeed_on_all_ranks_or_none import SingleProcess, collective_phase
from tests.marks import wide
from tests.unit.checkpoint.arrays import rank_data
from tests.unit.checkpoint.seats import Outcome, Seat, on_ranks

W = np.arange(7 * 12, dtype=np.float32).reshape(7, 12)


def quarter(rank: int, value: Any = W) -> list[Piece]:
    """tp 2 x dp 2: columns by rank % 2, rows by rank // 2 as torch.chunk cuts them."""
    rows, columns = ((0, 4), (4, 7))[rank // 2], ((0, 6), (6, 12))[rank % 2]
    block = value[rows[0] : rows[1], columns[0] : columns[1]]
    pieces = [Piece("w", (7, 12), (rows[0], columns[0]), block)]
    return [*pieces, Piece("n", (), (), np.array(5, np.int64))] if rank == 0 else pieces


def test_four_writers_make_one_checkpoint(tmp_path: Path) -> None:
    def work(seat: Seat) -> Any:
        with CheckpointWriter(tmp_path, keep_last=2, asynchronous=True, peers=seat) as writer:
            for step in (1, 2, 3):
                live = torch.from_numpy(W * step)
                writer.save(step, quarter(seat.rank, live), {"step": step}, {"tokenizer.json": b"{}"})
                live.zero_()  # the copy has been taken
        return writer.last

    facts = on_ranks(4, work)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000002", "step_00000003"]
    for step in (2, 3):
        path = tmp_path / f"step_{step:08d}"
        names = {f"rank_{rank:05d}.{kind}" for rank in range(4) for kind in ("safetensors", "blocks.json")}
        assert {file.name for file in path.iterdir()} == names | {"manifest.json", "tokenizer.json"}
        reader = CheckpointReader(path)
        assert Contents(reader.path).find_damage() == []
        assert reader.read("w").numpy().tolist() == (W * step).tolist()
        assert reader.read("n").item() == 5
    assert {(fact.step, fact.path, fact.num_bytes) for fact in facts} == {(3, path, facts[0].num_bytes)}
    assert facts[0].num_bytes == sum(file.stat().st_size for file in path.iterdir())


def test_a_replica_that_owns_nothing_writes_nothing(tmp_path: Path) -> None:
    def work(seat: Seat) -> Any:
        pieces = [Piece("w", W.shape, (0, 0), W)] if seat.rank == 1 else []
        return save_checkpoint(tmp_path, 1, rank_data(pieces), {}, {}, seat)

    assert len(set(on_ranks(3, work))) == 1
    path = tmp_path / "step_00000001"
    assert {file.name for file in path.iterdir()} == {
        "rank_00001.safetensors", "rank_00001.blocks.json", "manifest.json",
    }  # fmt: skip
    assert Contents(path).find_damage() == []


@pytest.mark.parametrize(
    ("point", "count", "action"),
    [("ckpt.mid_write", 6, "enospc"), ("ckpt.before_rename", 1, "exc"), *wide(("ckpt.mid_write", 6, "exc")),
     *wide(("ckpt.begin", 1, "enospc"), ("ckpt.mid_write", 1, "exc"), ("ckpt.before_manifest", 1, "enospc"))],
)  # fmt: skip
def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(
    tmp_path: Path, point: str, count: int, action: str
) -> None:
    def save(writer: CheckpointWriter, seat: Seat, step: int) -> Outcome:
        try:
            writer.save(step, quarter(seat.rank), {}, {})
            writer.wait()
        except Exception as error:
            return error
        return None

    def work(seat: Seat) -> Any:
        writer = CheckpointWriter(tmp_path, keep_last=9, asynchronous=True, peers=seat)
        return save(writer, seat, 1), save(writer, seat, 2)

    fault_injection.arm(Fault(action, point, count))
    first, second = zip(*on_ranks(4, work), strict=True)
    full = [isinstance(error, StorageError) for error in first]
    reason = "the disk is full" if action == "enospc" else "RuntimeError: fault at"
    told = [error for error in first if str(error).startswith("rank ") and reason in str(error)]
    assert len(told) == 3
    if action == "enospc":
        assert all(full)  # so that training goes on everywhere
    else:
        assert not any(full)
        assert {type(error) for error in first} == {RuntimeError, LmtrainError}
    assert second == (None,) * 4
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]
    assert Contents(tmp_path / "step_00000002").find_damage() == []


def test_a_hole_between_the_ranks_is_refused(tmp_path: Path) -> None:
    def work(seat: Seat) -> Any:
        return save_checkpoint(tmp_path, 1, rank_data(quarter(seat.rank) if seat.rank != 2 else []), {}, {}, seat)

    errors = on_ranks(4, work)
    assert "w cannot be saved: the pieces hold 66 of its 84 elements" in str(errors[0])
    assert all(str(error) == f"rank 0 of 4: {errors[0]}" for error in errors[1:])
    assert list(tmp_path.iterdir()) == []


def test_room_is_asked_for_all_ranks_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = rank_data([Piece("w", (8, 1 << 17), (0, 0), np.zeros((8, 1 << 17), np.float32))])  # 4 MiB
    monkeypatch.setattr("lmtrain.checkpoint.find_and_prune.free_bytes", lambda _: 8 << 20)  # two need over 4 MiB
    errors = on_ranks(2, lambda seat: save_checkpoint(tmp_path, 1, large, {}, {}, seat))
    assert "needs 9.0 MiB" in str(errors[0])
    assert {type(error) for error in errors} == {StorageError}


@pytest.mark.parametrize("error", [OutputError, StorageError, NonFiniteLossError])
def test_the_others_end_with_the_same_exit_code(error: type[LmtrainError]) -> None:
    def work(seat: Seat) -> Any:
        with collective_phase(seat, 1) as agreement:
            if seat.rank == 1:
                raise error("mine")
            agreement.own_numbers = (seat.rank,)

    found = on_ranks(3, work)
    assert [e.exit_code for e in found] == [error.exit_code] * 3
    assert str(found[1]) == "mine"
    assert str(found[0]) == str(found[2]) == "rank 1 of 3: mine"


def test_numbers_are_exchanged_at_the_end_of_a_phase() -> None:
    def work(seat: Seat | SingleProcess) -> Any:
        with collective_phase(seat, 2) as agreement:
            agreement.own_numbers = seat.rank, 7
        return agreement.all_numbers

    assert on_ranks(3, work) == [[[0, 7], [1, 7], [2, 7]]] * 3
    assert work(SingleProcess()) == [[0, 7]]


def test_a_part_manifest_says_what_was_written(tmp_path: Path) -> None:
    records = [write_rank(tmp_path, rank, rank_data(quarter(rank))) for rank in (1, 3)]
    for rank, record in zip((1, 3), records, strict=True):
        (tmp_path / part_manifest_name(rank)).write_bytes(encode_part_manifest(record))
    assert collect_part_manifests(tmp_path, [1, 3]) == [RankRecord(r.files, r.pieces) for r in records]
    assert not list(tmp_path.glob("*.part.json"))


@pytest.mark.parametrize("text", ["{}", "[]", '{"files": {"a": 1}, "pieces": []}', '{"files": {}, "pieces": [[1]]}'])
def test_a_part_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p").write_text(text)
    with pytest.raises(CheckpointError, match="is not a valid part manifest"):
        read_part_manifest(tmp_path / "p")


def test_a_leftover_is_known_by_two_numbers(tmp_path: Path) -> None:
    path = new_leftover_path(tmp_path, 12)
    assert leftover_numbers(path)[0] == os.getpid()
    assert leftover_path(tmp_path, 12, leftover_numbers(path)) == path


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_rectangle_is_read_from_any_cut(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Saved by a grid of ranks, loaded as blocks with other borders; the blocks may be views of something larger."""
    cut = [sorted({0, n, *data.draw(st.lists(st.integers(1, n - 1), max_size=2))}) for n in W.shape]
    grid = [(r, c) for r in zip(cut[0], cut[0][1:], strict=False) for c in zip(cut[1], cut[1][1:], strict=False)]
    folder = tmp_path_factory.mktemp("grid")

    def work(seat: Seat) -> Any:
        (a, b), (c, d) = grid[seat.rank]
        save_checkpoint(folder, 1, rank_data([Piece("w", W.shape, (a, c), W[a:b, c:d])]), {}, {}, seat)

    assert on_ranks(len(grid), work) == [None] * len(grid)
    top, left = (data.draw(st.integers(0, n - 1)) for n in W.shape)
    height, width = (data.draw(st.integers(0, n - at)) for n, at in zip(W.shape, (top, left), strict=True))
    shard = torch.full((9, 14), -1.0)  # with rows of padding, which no piece names
    block = shard[1 : 1 + height, 1 : 1 + width]
    CheckpointReader(folder / "step_00000001").load_into([Piece("w", W.shape, (top, left), block)])
    assert block.tolist() == W[top : top + height, left : left + width].tolist()
    assert (shard == -1.0).sum() == 9 * 14 - height * width
