"""The reader: any box from any pieces, at any layout, and clear refusals of what does not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.checkpoint import read_verified_contents
from lmtrain.checkpoint import tensor_reader as reader_module
from lmtrain.checkpoint.disk import block_hashed_file, safetensors_file
from lmtrain.checkpoint.disk import checkpoint_format as format_module
from lmtrain.checkpoint.disk.checkpoint_format import DTYPES
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.checkpoint.save.background_writer import CheckpointWriter
from lmtrain.checkpoint.save.commit import commit_checkpoint, write_rank
from lmtrain.checkpoint.tensor_reader import CheckpointReader
from lmtrain.errors import CheckpointError, MissingInputError
from lmtrain.layout import Piece
from tests.unit.checkpoint.arrays import rank_data

Arrays = dict[str, np.ndarray]


def targets(arrays: Arrays) -> list[Piece]:
    """What a run of one process asks for, filled with something else."""
    return [
        Piece(n, a.shape, (0,) * a.ndim, torch.full(a.shape, 5).to(torch.from_numpy(a).dtype))
        for n, a in arrays.items()
    ]


def load_all(path: Path, arrays: Arrays) -> None:
    reader = CheckpointReader(path)
    pieces = targets(arrays)
    reader.load_into(pieces)
    reader.read_file("tokenizer.json")
    for piece in pieces:
        assert torch.equal(piece.block, torch.from_numpy(arrays[piece.name]))


def test_every_type_and_shape_comes_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for code, name in DTYPES.items():
        for shape in ((), (3,), (5, 7), (0, 4), (2, 1, 3)):
            values = torch.randint(0, 2 if code == "BOOL" else 100, shape, generator=generator)
            tensors[f"{code}{list(shape)}"] = values.to(getattr(torch, name))
    with CheckpointWriter(tmp_path, keep_last=1, asynchronous=False) as writer:
        writer.save(3, [Piece(n, tuple(t.shape), (0,) * t.ndim, t) for n, t in tensors.items()], {"a": [1]}, {})
    reader = CheckpointReader(tmp_path / "step_00000003")
    assert reader.manifest.tensors.keys() == tensors.keys()
    assert (reader.step, reader.state) == (3, {"a": [1]})
    blocks = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    reader.load_into([Piece(n, tuple(t.shape), (0,) * t.ndim, t) for n, t in blocks.items()])
    for name, tensor in tensors.items():
        assert (reader.shape(name), reader.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(reader.read(name), tensor)
        assert torch.equal(blocks[name], tensor)
    assert Contents(reader.path).find_damage() == []


@pytest.mark.parametrize("rows_bytes", [1, 1 << 20])
def test_blocks_of_another_type_or_that_lie_otherwise_are_filled_a_few_rows_at_a_time(
    checkpoint: Path, arrays: Arrays, monkeypatch: pytest.MonkeyPatch, rows_bytes: int
) -> None:
    monkeypatch.setattr(reader_module, "_PART_ITEMS", rows_bytes)
    name, whole = next((n, torch.from_numpy(a)) for n, a in arrays.items() if a.ndim == 2 and a.dtype == np.float32)
    turned = torch.zeros(whole.shape[::-1]).T
    narrow = torch.zeros(whole.shape, dtype=torch.bfloat16)
    for block, rounded in ((turned, False), (narrow, True)):
        CheckpointReader(checkpoint).load_into([Piece(name, tuple(whole.shape), (0, 0), block)], allow_rounding=rounded)
        assert torch.equal(block, whole.to(block.dtype))
    with pytest.raises(CheckpointError, match="is float32 in the checkpoint, but bfloat16 in the run"):
        CheckpointReader(checkpoint).load_into([Piece(name, tuple(whole.shape), (0, 0), narrow)])


def test_a_checkpoint_of_two_processes_reads_as_one(checkpoint: Path, arrays: Arrays) -> None:
    load_all(checkpoint, arrays)
    assert Contents(checkpoint).find_damage() == []


def test_parts_of_a_tensor(checkpoint: Path, arrays: Arrays) -> None:
    reader, wide = CheckpointReader(checkpoint), torch.from_numpy(arrays["wide"])
    assert torch.equal(reader.read("wide", (10, 50), (90, 20)), wide[10:100, 50:70])
    assert torch.equal(reader.read("wide", (109, 0)), wide[109:])
    assert reader.read("wide", (5, 5), (0, 3)).shape == (0, 3)
    assert reader.read("count").item() == 41
    for offset, shape in (((0, 0), (111, 1)), ((-1, 0), (1, 1)), ((0,), (1,)), ((0, 0), (1,))):
        with pytest.raises(CheckpointError, match="wide"):
            reader.read("wide", offset, shape)


def test_blocks_of_weights_and_of_arrays_are_filled_in_place(checkpoint: Path, arrays: Arrays) -> None:
    weight = torch.nn.Parameter(torch.zeros(110, 100))
    rows = np.zeros((4, 100), np.float32)
    CheckpointReader(checkpoint).load_into(
        [Piece("wide", (110, 100), (0, 0), weight), Piece("wide", (110, 100), (8, 0), rows)]
    )
    assert torch.equal(weight.detach(), torch.from_numpy(arrays["wide"]))
    np.testing.assert_array_equal(rows, arrays["wide"][8:12])


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut into boxes, unevenly and along any axes."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[axis]))
        left = tuple(at if i == axis else n for i, n in enumerate(box.shape))
        right = tuple(n - at if i == axis else n for i, n in enumerate(box.shape))
        offset = tuple(o + at if i == axis else o for i, o in enumerate(box.offset))
        boxes += [b for b in (Box(box.offset, left), Box(offset, right)) if b.volume or not box.volume]
    return boxes


@pytest.mark.wide
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_layout_loads_at_any_other(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Cut a tensor one way over some processes, load it cut another way; blocks of 64 bytes make files of many."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=4)))
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    folder = tmp_path_factory.mktemp("layouts")
    with pytest.MonkeyPatch.context() as patch:
        for module in (block_hashed_file, safetensors_file, read_verified_contents, format_module):
            patch.setattr(module, "BLOCK_BYTES", 64)
        ranks: list[list[Piece]] = [[] for _ in range(data.draw(st.integers(1, 3)))]
        for box in data.draw(cuts(shape)):
            block = np.asarray(array[box.slices()])
            data.draw(st.sampled_from(ranks)).append(Piece("w", shape, box.offset, block))
        attempt = folder / "step_00000001.tmp-1-1"
        attempt.mkdir()
        records = [write_rank(attempt, rank, rank_data(pieces)) for rank, pieces in enumerate(ranks)]
        reader = CheckpointReader(commit_checkpoint(attempt, 1, records, {}, {})[0])
        wanted = [Piece("w", shape, b.offset, torch.full(b.shape, -1).to(torch.int32)) for b in data.draw(cuts(shape))]
        reader.load_into(wanted)
        for piece in wanted:
            box = Box(piece.offset, tuple(piece.block.shape))
            np.testing.assert_array_equal(piece.block.numpy(), array[box.slices()])
        assert Contents(reader.path).find_damage() == []


def test_a_run_that_does_not_fit_is_told_everything(checkpoint: Path) -> None:
    wanted = [
        Piece("wide", (110, 200), (0, 0), torch.zeros(110, 200)),
        Piece("bias", (33,), (0,), torch.zeros(33, dtype=torch.bfloat16)),
        Piece("cuont", (), (), torch.tensor(0)),
        *[Piece(f"layers.{i}", (1,), (0,), torch.zeros(1)) for i in range(9)],
    ]
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(checkpoint).load_into(wanted)
    message = str(caught.value)
    assert "wide has shape [110, 100] in the checkpoint, but [110, 200] in the run" in message
    assert "bias is float32 in the checkpoint, but bfloat16 in the run" in message
    assert "it has no cuont, layers.0, layers.1, layers.2 and 6 more (Did you mean count?)" in message
    assert "The checkpoint is of the model kind=gpt, width=8." in message
    assert len(message) < 1000


def test_nothing_is_filled_when_something_does_not_fit(checkpoint: Path) -> None:
    block = torch.zeros(33)
    with pytest.raises(CheckpointError, match="it has no other"):
        CheckpointReader(checkpoint).load_into(
            [Piece("bias", (33,), (0,), block), Piece("other", (1,), (0,), torch.zeros(1))]
        )
    assert (block == 0).all()


def test_a_part_of_a_checkpoint_may_be_loaded(checkpoint: Path, arrays: Arrays) -> None:
    pieces = [piece for piece in targets(arrays) if piece.name == "bias"]
    CheckpointReader(checkpoint).load_into(pieces)
    assert torch.equal(pieces[0].block, torch.from_numpy(arrays["bias"]))


def test_unknown_names_and_paths(checkpoint: Path, tmp_path: Path) -> None:
    reader = CheckpointReader(checkpoint)
    with pytest.raises(CheckpointError, match=r"has no tensor baias. Did you mean bias\?"):
        reader.read("baias")
    for name in ("tokeniser.json", "../step_00000007/tokenizer.json", "/etc/passwd", "manifest.json"):
        with pytest.raises(CheckpointError, match="has no file"):
            reader.read_file(name)
    with pytest.raises(MissingInputError, match="nowhere does not exist"):
        CheckpointReader(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"manifest\.json does not exist"):
        CheckpointReader(tmp_path)
