"""Read and write the safetensors format: 8 bytes of header length, a JSON header, the tensors' bytes. Torch-free.

because: the official library, which can open these files, can neither hash while streaming nor read hashed slices
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmtrain.checkpoint.disk.block_hashed_file import HashedFile
from lmtrain.checkpoint.disk.checkpoint_format import (
    BLOCK_BYTES,
    DTYPES,
    ITEM_BYTES,
    MAX_AXES,
    MAX_KEY_LENGTH,
    PieceEntry,
    TensorEntry,
    dtype_code,
)
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box, cover_problem, is_contiguous
from lmtrain.errors import CheckpointError, DataError
from lmtrain.layout import Piece
from lmtrain.runtime.files.atomic_files import MAX_JSON_BYTES, parse_json

Array = np.ndarray[Any, np.dtype[Any]]
MAX_HEADER_BYTES = MAX_JSON_BYTES  # because: larger ones are not read; the official library's own limit is higher


@dataclass(frozen=True)
class PieceSpec:
    """The description of a piece, a rectangular part of a tensor: the tensor's name, type and shape, and the piece's
    box in it.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box

    @property
    def key(self) -> str:
        """The piece's key in a file: the tensor's name for a whole tensor, else NAME@OFFSET."""
        is_whole = self.box.shape == self.global_shape
        return self.name if is_whole else f"{self.name}@{','.join(map(str, self.box.offset))}"

    @property
    def num_bytes(self) -> int:
        return self.box.volume * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class RankData:
    """The data that one rank saves: its pieces in the order of its file, and all their bytes in this order, in parts.
    """

    specs: Sequence[PieceSpec]
    parts: Iterable[memoryview]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)


def sort_for_file(pieces: Iterable[Piece]) -> list[Piece]:
    """Return pieces in the order of a file: wide types first, so that each begins at a multiple of its item size."""
    return sorted(pieces, key=lambda piece: -ITEM_BYTES[dtype_code(piece.block)])


def piece_box(piece: Piece) -> Box:
    return Box(tuple(piece.offset), tuple(piece.block.shape))


def piece_spec(piece: Piece) -> PieceSpec:
    return PieceSpec(piece.name, dtype_code(piece.block), tuple(piece.global_shape), piece_box(piece))


def piece_entries(file: str, specs: Iterable[PieceSpec]) -> list[tuple[PieceSpec, PieceEntry]]:
    """Return each piece of a file with its manifest entry."""
    return [(spec, PieceEntry(file, spec.key, spec.box)) for spec in specs]


def array_bytes(array: Array) -> Array:
    """Return an array's little-endian bytes as a flat uint8 array."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)


def encode_header(specs: Sequence[PieceSpec]) -> bytes:
    """Return the header of a safetensors file, including its 8 bytes of length. The file is to hold the pieces `specs`
    (tensors or rectangular parts of tensors) in this order. Raise CheckpointError if a piece is listed twice, or if the
    header would be too large.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        if spec.key in header:
            raise CheckpointError(f"A process was given the piece {spec.key} to save twice. Give it each piece once.")
        header[spec.key] = {"dtype": spec.dtype, "shape": list(spec.box.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"A safetensors file cannot list {len(specs)} pieces of tensors. Save from more processes."
        )
    return struct.pack("<Q", len(text)) + text


def merge_pieces(pieces_by_rank: Sequence[Sequence[tuple[PieceSpec, PieceEntry]]]) -> dict[str, TensorEntry]:
    """Return tensor name -> the tensor's entry for the manifest, which lists the pieces (rectangular parts) that all
    ranks save of it. `pieces_by_rank` has (description, manifest entry) of each piece. Raise CheckpointError unless the
    pieces of a tensor agree on its type and shape and cover it exactly once.
    """
    specs: dict[str, PieceSpec] = {}
    pieces: dict[str, list[PieceEntry]] = {}
    for spec, piece in (item for rank_pieces in pieces_by_rank for item in rank_pieces):
        first = specs.setdefault(spec.name, spec)
        if (first.dtype, first.global_shape) != (spec.dtype, spec.global_shape):
            raise CheckpointError(
                f"Processes disagree about the tensor {spec.name}: {first.dtype} {list(first.global_shape)} and "
                f"{spec.dtype} {list(spec.global_shape)}. Give it the same type and shape on every process."
            )
        pieces.setdefault(spec.name, []).append(piece)
    for name, spec in specs.items():
        if (problem := cover_problem(spec.global_shape, [piece.box for piece in pieces[name]])) is not None:
            raise CheckpointError(f"The tensor {name} cannot be saved: {problem}. Save every element exactly once.")
    return {
        name: TensorEntry(spec.dtype, spec.global_shape, tuple(pieces[name])) for name, spec in specs.items()
    }


@dataclass(frozen=True)
class StoredPiece:
    """A piece inside a safetensors file, as its header describes it."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # offset in bytes from the beginning of the file


def read_header(file: HashedFile) -> dict[str, StoredPiece]:
    """Return key -> piece (a tensor or a rectangular part of one: its type, shape and first byte), read from the header
    of a safetensors file. Raise CheckpointError if the header is malformed or does not fit the size of the file.
    """
    if file.size < 8:
        raise CheckpointError(f"{file.path} is too short for a safetensors file. Restore it from a copy.")
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if length > min(file.size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(f"{file.path} is damaged: it states a header of {length} bytes. Restore it from a copy.")
    try:
        return _decode_header(parse_json(bytes(file.read(8, length)), file.path), 8 + length, file.size)
    except (KeyError, TypeError, AttributeError, ValueError, DataError) as error:
        raise CheckpointError(f"{file.path} has a wrong header: {error}. Restore it from a copy.") from error


def _decode_header(header: dict[str, dict[str, list[int]]], base: int, file_size: int) -> dict[str, StoredPiece]:
    """Check the parsed header of a safetensors file, and return key -> piece (type, shape and first byte). The data
    begin at byte `base` and must fill the file up to its end, `file_size`. Raise ValueError if the header is invalid.
    """
    header.pop("__metadata__", None)
    end = 0
    stored: dict[str, StoredPiece] = {}
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        # because: a product of very many numbers takes hours, and a product of a text and a number can fill the memory
        if len(shape) > MAX_AXES or not all(type(n) is int and n >= 0 for n in (start, stop, *shape)):
            raise ValueError(f"the entry of {key[:MAX_KEY_LENGTH]!r} has an invalid shape or data_offsets")
        if dtype not in DTYPES or start != end or stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"the dtype and shape of {key[:MAX_KEY_LENGTH]!r} do not fit its data_offsets")
        stored[key] = StoredPiece(dtype, shape, base + start)
        end = stop
    if base + end != file_size:
        raise ValueError(f"the header describes a file of {base + end} bytes, but the file has {file_size}")
    return stored


def read_box(file: HashedFile, start: int, shape: tuple[int, ...], box: Box, out: Array) -> None:
    """Read a rectangular part, `box`, of an array in a file into `out`. The array has the shape `shape` and the type of
    `out`, and begins at byte `start` of the file.

    Ranges of at most about one 4 MiB block are read at a time, from the box's first element to its last; if its rows
    are further apart than that, each row is read separately.
    """
    if not box.volume:
        return
    strides = tuple(out.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))
    first = start + sum(o * s for o, s in zip(box.offset, strides, strict=True))
    if out.flags.c_contiguous and is_contiguous(box, shape):
        file.read_into(first, out.reshape(-1).view(np.uint8).data)
    else:
        _read_strided(file, first, strides, out)


def _read_strided(file: HashedFile, first: int, strides: tuple[int, ...], out: Array) -> None:
    """Fill `out` with elements from a file. The first element begins at byte `first`; elements that are neighbors along
    axis i of `out` begin `strides[i]` bytes apart.
    """
    span_bytes = sum((n - 1) * s for n, s in zip(out.shape, strides, strict=True)) + out.itemsize
    if span_bytes <= BLOCK_BYTES or out.size == 1:
        out[...] = np.ndarray(out.shape, out.dtype, file.read(first, span_bytes), 0, strides)
        return
    axis = next(i for i, n in enumerate(out.shape) if n > 1)
    step = max(1, BLOCK_BYTES // strides[axis])
    for at in range(0, out.shape[axis], step):
        _read_strided(file, first + at * strides[axis], strides, out[(slice(None),) * axis + (slice(at, at + step),)])
