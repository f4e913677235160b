"""A checkpoint's contents as verified bytes and numpy arrays, and the model that it says it is of. Torch-free.

Called by the reader, which turns arrays into tensors, and by whoever reads a checkpoint without a run's settings.
Nothing is given out before its hash has been checked, and no tensor is allocated that the files, whose sizes are
checked, could not hold. What a checkpoint says of itself is judged as settings are, and compared with the tensors and
the files that are there before anything of the stated size is made.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
    Manifest,
    PieceEntry,
    TensorEntry,
    blocks_file,
)
from lmtrain.checkpoint.disk.hashed import BlockCache, HashedFile, read_hashed
from lmtrain.checkpoint.disk.tensor_file import Array, Stored, read_box, read_header
from lmtrain.checkpoint.store import load_manifest
from lmtrain.config.build import build_settings
from lmtrain.errors import CheckpointError, DataError, LmtrainError, join_few, spelling_hint
from lmtrain.models.model_settings import ModelSettings, Shape, unpadded_shapes
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.runtime.files.files import parse_json

# Integers of the item's size carry the bits of any type: numpy has no bfloat16.
_CARRIERS: dict[int, Any] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}

_CACHED_BLOCKS = 16
_MANY_NAMES = 5000  # because: comparing one with each of more takes seconds
_MOST_SETTINGS = 200  # of a model
_FEW_LAYERS = 1024  # a model's own list of so many layers is soon made, however few tensors there are
_LITTLE_PADDING = 1 << 24  # numbers
_LONGEST = 1000  # characters of what is wrong with settings


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
        """Return a box of a tensor, assembled from the pieces that hold it, as integers of its item's size."""
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
        return found + [
            f"{self.path / name} holds {key}, which the manifest does not list."
            for name, key in sorted(held - listed.keys())
        ]

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
        """Open a safetensors file once; return it with its header. Its list of block hashes is verified."""
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
    """Return a suggestion for a misspelt name, or how to find it if there are too many names to search."""
    found = spelling_hint(name, known) if len(known) <= _MANY_NAMES else ""
    return found if 0 < len(found) < 300 else "List its names first."


def model_of(state: Mapping[str, Any], where: object) -> ModelSettings:
    """Return the model settings in a checkpoint's state; raise if they are missing or wrong."""
    found = state.get("model")
    if isinstance(found, dict) and len(found) > _MOST_SETTINGS:
        raise CheckpointError(f"{where} gives its model {len(found)} settings, and no model has so many. Restore it.")
    try:
        return build_settings(ModelSettings, found, "model")  # type: ignore[type-abstract]
    except LmtrainError as error:
        raise CheckpointError(f"{where} does not say what model it is of: {str(error)[:_LONGEST]}") from error


def layout_of(state: Mapping[str, Any]) -> ParallelSettings | None:
    """Return the parallel settings that a checkpoint was made with; None if they are missing or no longer valid."""
    settings = state.get("settings")
    found = settings.get("parallel") if isinstance(settings, dict) else None
    if not isinstance(found, dict) or len(found) > _MOST_SETTINGS:
        return None
    try:
        return build_settings(ParallelSettings, found, "parallel")
    except LmtrainError:
        return None


def checked_model(contents: Contents) -> ModelSettings:
    """Return the model of a checkpoint; raise if its tensors or files do not fit that model."""
    model = model_of(contents.manifest.state, contents.path)
    if problems := fit_problems(contents.manifest, model):
        raise CheckpointError(f"{contents.path / MANIFEST} contradicts itself: {'; '.join(problems)}. Restore a copy.")
    _check_files(contents)
    return model


def fit_problems(manifest: Manifest, model: ModelSettings) -> list[str]:
    """Return what is wrong with names, shapes and ties.

    The cost grows with the tensors held, not with the model claimed.
    """
    num_layers, num_tensors = model.shape.num_layers, len(manifest.tensors)
    if num_layers > max(_FEW_LAYERS, num_tensors):
        return [f"its model has {num_layers} layers and it holds {num_tensors} tensors"]
    shapes, first = unpadded_shapes(model), {tie.second: tie.first for tie in model.ties()}
    weights = {name.removeprefix("model."): t for name, t in manifest.tensors.items() if name.startswith("model.")}
    told = {f"model.{name}": shapes[name] for name in shapes if name in weights}
    # `optim.exp_avg.norm.weight` has the shape of `norm.weight`
    slots = {name: name.split(".", 2)[-1] for name in manifest.tensors if name.startswith("optim.")}
    told |= {name: shapes[weight] for name, weight in slots.items() if weight in shapes}
    kinds = (
        _said(
            (name for name in first if name in weights),
            lambda name: f"it holds model.{name}, which is one with model.{first[name]} and is stored under that name "
            "alone",
        ),
        _said(sorted(shapes.keys() - weights.keys()), lambda name: f"it has no model.{name}"),
        _said(
            sorted(weights.keys() - shapes.keys() - first.keys()),
            lambda name: f"it holds model.{name}, which its model does not have. {near(name, shapes)}",
        ),
        _said(
            (name for name, shape in told.items() if manifest.tensors[name].shape != shape),
            lambda name: f"{name} has shape {list(manifest.tensors[name].shape)} and the model says {list(told[name])}",
        ),
        _padding_problem(model, shapes),
    )
    return [text for text in kinds if text]


def _said(names: Iterable[str], words: Callable[[str], str]) -> str:
    """Return the first few names in words; wording each of a hundred thousand would take hours."""
    names = list(names)
    return join_few([words(name) if number < 4 else name for number, name in enumerate(names)], "; ")


def _padding_problem(model: ModelSettings, shapes: Mapping[str, Shape]) -> str:
    """Rows that pad a vocabulary are in no file, so they have a bound of their own."""
    true, padded = (sum(map(math.prod, some.values())) for some in (shapes, model.weights()))
    if padded - true <= max(true, _LITTLE_PADDING):
        return ""
    return f"the rows that pad its vocabulary would be {padded - true} numbers, more than its weights are"


def _check_files(contents: Contents) -> None:
    """Raise if a file is missing or has another size than the manifest says; read nothing."""
    manifest = contents.manifest
    for name in sorted({piece.file for tensor in manifest.tensors.values() for piece in tensor.pieces}):
        try:
            found = os.lstat(contents.path / name)
            size = found.st_size if stat.S_ISREG(found.st_mode) else None
        except OSError:
            size = None
        if size != manifest.files[name].size:
            held = "is not there as a plain file" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"{contents.path / name} {held} and the manifest says {manifest.files[name].size} bytes. "
                "Restore it from a copy."
            )
