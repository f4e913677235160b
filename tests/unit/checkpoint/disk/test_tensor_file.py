"""Our safetensors files: the official library opens them, and its own open here."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import safe_open

from lmtrain.checkpoint.disk import block_hashed_file, safetensors_file
from lmtrain.checkpoint.disk.block_hashed_file import HashedFile, write_hashed
from lmtrain.checkpoint.disk.checkpoint_format import DTYPES, ITEM_BYTES
from lmtrain.checkpoint.disk.safetensors_file import encode_header, read_box, read_header
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box
from lmtrain.checkpoint.save.background_writer import HostMemory
from lmtrain.errors import CheckpointError
from lmtrain.layout import Piece
from tests.unit.checkpoint.arrays import rank_data


def write(path: Path, pieces: list[Piece]) -> HashedFile:
    data = HostMemory().capture(pieces)
    return HashedFile(path, *write_hashed(path, [encode_header(data.specs), *data.parts]))


def whole_piece(name: str, tensor: torch.Tensor) -> Piece:
    return Piece(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


def tensors_of_every_type() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    result = {}
    for code, name in DTYPES.items():
        for shape in ((), (3,), (5, 7), (0, 4), (2, 1, 3)):
            values = torch.randint(0, 2 if code == "BOOL" else 100, shape, generator=generator)
            result[f"{code}{list(shape)}"] = values.to(getattr(torch, name))
    return result


def test_the_official_library_opens_our_files(tmp_path: Path) -> None:
    tensors = tensors_of_every_type()
    write(tmp_path / "ours", [whole_piece(name, t) for name, t in tensors.items()])
    with safe_open(tmp_path / "ours", "pt") as file:
        assert set(file.keys()) == tensors.keys()
        assert file.metadata() == {"format": "pt"}
    loaded = safetensors.torch.load_file(tmp_path / "ours")
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


def test_the_official_librarys_files_open_here(tmp_path: Path) -> None:
    tensors = tensors_of_every_type()
    safetensors.torch.save_file(tensors, tmp_path / "theirs")
    file = HashedFile(tmp_path / "theirs", *write_hashed(tmp_path / "copy", [(tmp_path / "theirs").read_bytes()]))
    header = read_header(file)
    assert {name: (s.dtype, s.shape) for name, s in header.items()} == {
        name: (name.partition("[")[0], tuple(t.shape)) for name, t in tensors.items()
    }


def test_tensors_begin_at_multiples_of_their_item_size(tmp_path: Path) -> None:
    file = write(tmp_path / "ours", [whole_piece(n, t) for n, t in tensors_of_every_type().items()])
    for stored in read_header(file).values():
        assert stored.start % ITEM_BYTES[stored.dtype] == 0


def test_arrays_of_any_memory_order_are_written_in_rows(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    blocks = {"plain": array, "transposed": array.T, "strided": array[::2, ::-1], "big_endian": array.astype(">f4")}
    data = rank_data([Piece(n, a.shape, (0, 0), a) for n, a in blocks.items()])
    write_hashed(tmp_path / "file", [encode_header(data.specs), *data.parts])
    loaded = safetensors.numpy.load_file(tmp_path / "file")
    for name, block in blocks.items():
        np.testing.assert_array_equal(loaded[name], block)


def test_any_box_of_a_block_is_read_with_small_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of 64 bytes, boxes span many of them and rows lie further apart than one."""
    monkeypatch.setattr(block_hashed_file, "BLOCK_BYTES", 64)
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 64)
    array = np.arange(5 * 6 * 50, dtype=np.int16).reshape(5, 6, 50)
    data = rank_data([Piece("a", array.shape, (0, 0, 0), array)])
    file = HashedFile(tmp_path / "f", *write_hashed(tmp_path / "f", [encode_header(data.specs), *data.parts]))
    start = read_header(file)["a"].start
    generator = np.random.default_rng(1)
    for _ in range(200):
        offset = [int(generator.integers(0, n + 1)) for n in array.shape]
        shape = [int(generator.integers(0, n - o + 1)) for n, o in zip(array.shape, offset, strict=True)]
        box = Box(tuple(offset), tuple(shape))
        out = np.full(box.shape, -1, np.int16)
        read_box(file, start, array.shape, box, out)
        np.testing.assert_array_equal(out, array[box.slices()])


def test_a_few_rows_touch_a_few_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hashed_file, "BLOCK_BYTES", 64)
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 64)
    array = np.zeros((10, 1000), np.uint8)
    data = rank_data([Piece("a", array.shape, (0, 0), array)])
    file = HashedFile(tmp_path / "f", *write_hashed(tmp_path / "f", [encode_header(data.specs), *data.parts]))
    start = read_header(file)["a"].start
    read: list[int] = []
    original = HashedFile._read_verified_block

    def note(self: HashedFile, index: int) -> bytes:
        read.append(index)
        return original(self, index)

    monkeypatch.setattr(HashedFile, "_read_verified_block", note)
    read_box(file, start, array.shape, Box((0, 500), (10, 8)), np.empty((10, 8), np.uint8))
    assert 10 <= len(set(read)) <= 20


def raw(header: object, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        raw({"a": ENTRY}, b"1234", length=2**60),
        raw({"a": ENTRY}, b"1234", length=2**64 - 1),
        raw({"a": ENTRY}, b"123"),
        raw({"a": ENTRY}, b"12345"),
        raw({"a": {**ENTRY, "shape": [5]}}, b"1234"),
        raw({"a": {**ENTRY, "dtype": "F32"}}, b"1234"),
        raw({"a": {**ENTRY, "dtype": "F9"}}, b"1234"),
        raw({"a": {**ENTRY, "data_offsets": [1, 5]}}, b"12345"),
        raw({"a": {**ENTRY, "data_offsets": [0, 2**60], "shape": [2**60]}}, b"1234"),
        raw({"a": ENTRY, "b": ENTRY}, b"1234"),
        raw({"a": ENTRY, "b": {**ENTRY, "data_offsets": [5, 9]}}, b"123456789"),
        raw({"a": {"dtype": "U8"}}, b"1234"),
        raw({"a": [1]}, b"1234"),
        raw({"a": {**ENTRY, "data_offsets": None}, "b": ENTRY}, b"1234"),
        raw({"a": {**ENTRY, "shape": ["4"]}}, b"1234"),
        raw({"a": {**ENTRY, "shape": ["x" * 9999, 10**12]}}, b"1234"),
        raw({"a": {**ENTRY, "shape": [4.0]}}, b"1234"),
        raw({"a": {**ENTRY, "shape": [4, *[1] * 9]}}, b"1234"),
        raw({"a": {**ENTRY, "shape": [2] * 2_000_000}}, b"1234"),
        raw({"a": {**ENTRY, "data_offsets": [0.0, 4.0]}}, b"1234"),
        raw({"a": {**ENTRY, "shape": [-2, -2]}}, b"1234"),
        raw([1, 2], b""),
        raw(b"\xff\xfe", b""),
        raw(b'{"a": NaN}', b""),
        raw(b'{"a": 1, "a": 2}', b""),
        raw(b"[" * 100_000 + b"]" * 100_000, b""),
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    file = HashedFile(tmp_path / "hostile", *write_hashed(tmp_path / "hostile", [content]))
    with pytest.raises(CheckpointError, match="hostile"):
        read_header(file)


def test_a_piece_given_twice_is_refused() -> None:
    piece = whole_piece("a", torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"the piece .* to save twice"):
        encode_header(HostMemory().capture([piece, piece]).specs)


def test_types_that_cannot_be_saved_are_named() -> None:
    with pytest.raises(CheckpointError, match="complex64"):
        HostMemory().capture([whole_piece("a", torch.zeros(3, dtype=torch.complex64))])
