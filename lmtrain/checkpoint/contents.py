"""A checkpoint's contents as verified bytes and numpy arrays. Torch-free, so that tools can read it without a device.

Called by the reader, which turns arrays into tensors. Nothing is given out before its hash has been checked, and no
tensor is allocated that the files, whose sizes are checked, could not hold.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.checkpoint.disk.boxes import Box, intersect, whole
from lmtrain.checkpoint.disk.format import (
    BLOCK_BYTES,
    ITEM_BYTES,
    MANIFEST,
    MAX_FILE_BYTES,
    PieceEntry,
    TensorEntry,
    blocks_file,
)
from lmtrain.checkpoint.disk.hashed import BlockCache, HashedFile, read_hashed
from lmtrain.checkpoint.disk.tensor_file import Array, Stored, read_box, read_header
from lmtrain.checkpoint.store import load_manifest
from lmtrain.errors import CheckpointError, DataError, nearest
from lmtrain.runtime.files.files import parse_json

# Integers of the item's size carry the bits of any type: numpy has no bfloat16.
_CARRIERS: dict[int, Any] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}

_CACHED_BLOCKS = 16
_MANY_NAMES = 5000  # because: comparing one with each of more takes seconds


class Contents:
    """An opened checkpoint. Holds no descriptors, so there is nothing to close. Threads may share it."""

    def __init__(self, path: Path, num_cached_blocks: int = _CACHED_BLOCKS) -> None:
        self.path = path
        self.manifest = load_manifest(path)
        self._cache = BlockCache(num_cached_blocks)
        self._files: dict[str, tuple[HashedFile, dict[str, Stored]]] = {}

    def tensor(self, name: str) -> TensorEntry:
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name}. {near(name, self.manifest.tensors)}")
        return entry

    def read_bits(self, name: str, box: Box | None = None, out: Array | None = None) -> Array:
        """A box of a tensor, put together from whatever pieces hold it, as integers of its item's size."""
        entry = self.tensor(name)
        box = box or whole(entry.shape)
        if not box.is_inside(entry.shape):
            raise CheckpointError(
                f"{name} has shape {list(entry.shape)} in {self.path} and the part at {list(box.offset)} of shape "
                f"{list(box.shape)} is not inside it. Ask for a part that is."
            )
        # because: files that are found to hold all of it bound the memory that it may take
        parts = [
            (*self._locate(name, entry, piece), piece.box, common)
            for piece in entry.pieces
            if (common := intersect(piece.box, box)) is not None
        ]
        if out is None:
            out = np.empty(box.shape, _CARRIERS[ITEM_BYTES[entry.dtype]])
        for file, stored, held, common in parts:
            target = out[common.relative_to(box.offset).slices()]
            read_box(file, stored.start, stored.shape, common.relative_to(held.offset), target)
        return out

    def read_file(self, name: str) -> bytes:
        entry = self.manifest.files.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no file {name}. {near(name, self.manifest.files)}")
        return read_hashed(self.path / name, entry, MAX_FILE_BYTES)

    def damages(self) -> list[str]:
        """Everything that is wrong, file by file; reads every byte."""
        files, tensors = self.manifest.files, self.manifest.tensors
        strange = sorted({*os.listdir(self.path)} - files.keys() - {MANIFEST})
        found = [f"{self.path / name} does not belong to the checkpoint. Remove it." for name in strange]
        for name in files:
            with _collecting(found):
                if blocks_file(name) in files and name != blocks_file(name):
                    self._open(name)[0].verify()
                else:
                    self.read_file(name)
        if found:
            return found
        listed = {(p.file, p.key): (name, entry, p) for name, entry in tensors.items() for p in entry.pieces}
        for place in listed.values():
            with _collecting(found):
                self._locate(*place)
        held = {(name, key) for name, (_, header) in self._files.items() for key in header}
        extra = sorted(held - listed.keys())
        return found + [f"{self.path / name} holds {key}, which the manifest does not list." for name, key in extra]

    def _locate(self, name: str, entry: TensorEntry, piece: PieceEntry) -> tuple[HashedFile, Stored]:
        file, header = self._open(piece.file)
        stored = header.get(piece.key)
        if stored is None or (stored.dtype, stored.shape) != (entry.dtype, piece.box.shape):
            held = "nothing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
            raise CheckpointError(
                f"{file.path} holds {held} under {piece.key!r} and the manifest says {entry.dtype} "
                f"{list(piece.box.shape)} of {name}. Restore the checkpoint from a copy."
            )
        return file, stored

    def _open(self, name: str) -> tuple[HashedFile, dict[str, Stored]]:
        """A safetensors file with its verified list of blocks and header; opened once."""
        if name not in self._files:
            path, listing = self.path / name, blocks_file(name)
            digests = _decode_blocks(self.read_file(listing), self.path / listing)
            file = HashedFile(path, self.manifest.files[name], digests, self._cache)
            self._files[name] = file, read_header(file)
        return self._files[name]


def _decode_blocks(data: bytes, where: Path) -> list[bytes]:
    try:
        listing = parse_json(data, where)
        if listing["block_bytes"] != BLOCK_BYTES:
            raise ValueError(f"blocks of {listing['block_bytes']} bytes")
        return [bytes.fromhex(digest) for digest in listing["blocks"]]
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise CheckpointError(f"{where} is not a list of blocks ({error}). Restore it from a copy.") from error


@contextmanager
def _collecting(found: list[str]) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        found.append(str(error))


def near(name: str, known: Collection[str]) -> str:
    """What a name may have been meant for, where that is soon found and soon said."""
    found = nearest(name, known) if len(known) <= _MANY_NAMES else ""
    return found if 0 < len(found) < 300 else "List its names first."
