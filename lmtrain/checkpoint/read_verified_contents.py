"""Read a checkpoint's contents as verified bytes and numpy arrays, and check its model settings. Torch-free.

Called by the reader, which turns arrays into tensors, and by commands that read a checkpoint without a run's settings.
Nothing is returned before its hash has been checked, and no tensor is allocated that the files, whose sizes are
checked, could not hold. A checkpoint's model settings are validated like a user's, and compared with the tensors and
files that are there before anything of the stated size is allocated.
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

from lmtrain.checkpoint.disk.block_hashed_file import BlockCache, HashedFile, read_hashed
from lmtrain.checkpoint.disk.checkpoint_format import (
    BLOCK_BYTES,
    ITEM_BYTES,
    MANIFEST,
    MAX_FILE_BYTES,
    Manifest,
    PieceEntry,
    TensorEntry,
    blocks_file,
)
from lmtrain.checkpoint.disk.safetensors_file import Array, StoredPiece, read_box, read_header
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box, full_box, intersect
from lmtrain.checkpoint.find_and_prune import load_manifest
from lmtrain.checkpoint.view_with_ema_as_weights import (
    AVERAGE_DTYPE,
    AVERAGE_PREFIX,
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    WeightSet,
    average_facts,
    holds_average,
    view_of_average,
)
from lmtrain.config.build_typed_settings import build_settings
from lmtrain.errors import CheckpointError, DataError, LmtrainError, join_few, spelling_hint
from lmtrain.models.model_settings import ModelSettings, Shape, unpadded_shapes
from lmtrain.placement.parallel_settings import ParallelSettings
from lmtrain.runtime.files.atomic_files import parse_json

# Integers of the item's size hold the bits of any type: numpy has no bfloat16.
_CARRIERS: dict[int, Any] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}

_CACHED_BLOCKS = 16
_MAX_NAMES_COMPARED = 5000  # because: comparing a misspelt name with more names takes seconds
_MAX_MODEL_SETTINGS = 200
_LAYERS_UNCHECKED = 1024  # so many layers are allowed with any number of tensors: listing them takes little time
_PADDING_UNCHECKED = 1 << 24  # so many padding numbers are allowed with any model
_MAX_ERROR_CHARS = 1000  # of an error about settings


class Contents:
    """An opened checkpoint: its manifest, tensors and extra files. Holds no descriptors, so there is nothing to close.
    Threads may share it.

    With `weights` "ema", `model.NAME` is the average of that weight, and the optimizer's tensors are hidden. Raise
    CheckpointError if the checkpoint holds no average.
    """

    def __init__(
        self, path: Path, num_cached_blocks: int = _CACHED_BLOCKS, weights: WeightSet = "model"
    ) -> None:
        self.path, self.weights = path, weights
        self.stored_manifest = load_manifest(path)  # everything that the folder holds, whatever `weights` is
        self.manifest = self.stored_manifest if weights == "model" else view_of_average(self.stored_manifest, path)
        self._cache = BlockCache(num_cached_blocks)
        self._files: dict[str, tuple[HashedFile, dict[str, StoredPiece]]] = {}

    @property
    def identity(self) -> str:
        """The digest of the manifest, which has the hashes of all files."""
        return self.manifest.digest

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folder of the checkpoint, as the only one that is read."""
        return (self.path,)

    def tensor(self, name: str) -> TensorEntry:
        """Return a tensor's type, shape and pieces, as the manifest gives them; raise CheckpointError if it has no such
        tensor.
        """
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name}. {suggest_name(name, self.manifest.tensors)}")
        return entry

    def read_bits(self, name: str, box: Box | None = None, out: Array | None = None) -> Array:
        """Return a tensor, or its rectangular part `box`, as an array of integers that hold the bits of its elements.
        `out`, if given, is filled and returned. Raise CheckpointError if there is no such tensor or part, or if its
        data are damaged.
        """
        entry = self.tensor(name)
        box = box or full_box(entry.shape)
        if not box.is_inside(entry.shape):
            raise CheckpointError(
                f"The tensor {name} in {self.path} has shape {list(entry.shape)}, so it has no part of shape "
                f"{list(box.shape)} at the offset {list(box.offset)}. Choose a part inside the tensor."
            )
        # because: once files are known to hold every piece, their sizes bound the memory that is allocated
        parts = [
            (*self._locate(name, entry, piece), piece.box, overlap)
            for piece in entry.pieces
            if (overlap := intersect(piece.box, box)) is not None
        ]
        if out is None:
            out = np.empty(box.shape, _CARRIERS[ITEM_BYTES[entry.dtype]])
        for file, stored, piece_box, overlap in parts:
            target = out[overlap.relative_to(box.offset).slices()]
            read_box(file, stored.start, stored.shape, overlap.relative_to(piece_box.offset), target)
        return out

    def describe_weights(self) -> dict[str, Any]:
        """Return facts for a report on a checkpoint that holds both weights and their average: `weights` says which are
        read ("model" or "ema"), and for "ema" `average` says how they were made. Return an empty dict if it holds no
        average.
        """
        if not holds_average(self.stored_manifest):
            return {}
        average = average_facts(self.manifest.state, self.path / MANIFEST) if self.weights == "ema" else None
        return {"weights": self.weights} | ({"average": average.summary} if average is not None else {})

    def first_byte(self, name: str, piece: PieceEntry) -> int:
        """Return the position in its file of a piece of the tensor `name`."""
        return self._locate(name, self.tensor(name), piece)[1].start

    @property
    def extra_names(self) -> list[str]:
        """The names of the extra files: all but the ranks' tensor files and their lists of blocks."""
        return [name for name in self.manifest.files if not name.startswith("rank_")]

    def read_file(self, name: str) -> bytes:
        """Return the bytes of an extra file of the checkpoint, such as tokenizer.json, verified against the file's
        hash.
        """
        entry = self.manifest.files.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no file {name}. {suggest_name(name, self.manifest.files)}")
        return read_hashed(self.path / name, entry, MAX_FILE_BYTES)

    def find_damage(self) -> list[str]:
        """Read every byte of every file of the checkpoint, and return a message for each thing that is wrong with it;
        an empty list if it is intact.
        """
        files, tensors = self.stored_manifest.files, self.stored_manifest.tensors
        unknown_names = sorted({*os.listdir(self.path)} - files.keys() - {MANIFEST})
        problems = [f"{self.path / name} does not belong to the checkpoint. Remove it." for name in unknown_names]
        for name in files:
            with _collect_errors(problems):
                if blocks_file(name) in files and name != blocks_file(name):
                    self._open(name)[0].verify()
                else:
                    self.read_file(name)
        if problems:
            return problems
        listed = {(p.file, p.key): (name, entry, p) for name, entry in tensors.items() for p in entry.pieces}
        for entry_of_piece in listed.values():
            with _collect_errors(problems):
                self._locate(*entry_of_piece)
        present = {(name, key) for name, (_, header) in self._files.items() for key in header}
        return problems + [
            f"{self.path / name} holds {key}, which the manifest does not list."
            for name, key in sorted(present - listed.keys())
        ]

    def _locate(self, name: str, entry: TensorEntry, piece: PieceEntry) -> tuple[HashedFile, StoredPiece]:
        """Return the tensor file that holds a piece of the tensor `name`, and the piece's place in that file. Raise
        CheckpointError if the file's header does not agree with the manifest's entries `entry` and `piece`.
        """
        file, header = self._open(piece.file)
        stored = header.get(piece.key)
        if stored is None or (stored.dtype, stored.shape) != (entry.dtype, piece.box.shape):
            stored_text = "nothing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
            raise CheckpointError(
                f"{file.path} holds {stored_text} under the key {piece.key!r}, but the manifest says {entry.dtype} "
                f"{list(piece.box.shape)} of {name}. Restore the checkpoint from a copy."
            )
        return file, stored

    def _open(self, name: str) -> tuple[HashedFile, dict[str, StoredPiece]]:
        """Return the tensor file `name` and the pieces that its header lists, by key. Both are read once, and the
        file's list of block hashes is verified.
        """
        if name not in self._files:
            path, listing = self.path / name, blocks_file(name)
            digests = _decode_blocks(self.read_file(listing), self.path / listing)
            file = HashedFile(path, self.manifest.files[name], digests, self._cache)
            self._files[name] = file, read_header(file)
        return self._files[name]


def _decode_blocks(data: bytes, where: Path) -> list[bytes]:
    """Parse a .blocks.json file and return the SHA-256 digests of the blocks that it lists. `where` is the file's path;
    raise CheckpointError, which names it, if the list is malformed.
    """
    try:
        listing = parse_json(data, where)
        if listing["block_bytes"] != BLOCK_BYTES:
            raise ValueError(f"the blocks have {listing['block_bytes']} bytes, not {BLOCK_BYTES}")
        return [bytes.fromhex(digest) for digest in listing["blocks"]]
    except (KeyError, TypeError, ValueError, DataError) as error:
        raise CheckpointError(f"{where} is not a list of block hashes ({error}). Restore it from a copy.") from error


@contextmanager
def _collect_errors(problems: list[str]) -> Iterator[None]:
    """Append the message of a CheckpointError that the `with` block raises to `problems`, instead of raising it."""
    try:
        yield
    except CheckpointError as error:
        problems.append(str(error))


def suggest_name(name: str, names: Collection[str]) -> str:
    """Return the hint for an unknown name: similar names ("Did you mean ..."), or to list the names if there is none.
    """
    hint = spelling_hint(name, names) if len(names) <= _MAX_NAMES_COMPARED else ""
    return hint if 0 < len(hint) < 300 else "List its names first."


def model_of(state: Mapping[str, Any], where: object) -> ModelSettings:
    """Return the model settings from `state`, the state in a checkpoint's manifest. Raise CheckpointError, which names
    `where`, if they are invalid.
    """
    settings = state.get("model")
    if isinstance(settings, dict) and len(settings) > _MAX_MODEL_SETTINGS:
        raise CheckpointError(
            f"{where} has {len(settings)} model settings; at most {_MAX_MODEL_SETTINGS} are allowed. "
            "Restore it from a copy."
        )
    try:
        return build_settings(ModelSettings, settings, "model")  # type: ignore[type-abstract]
    except LmtrainError as error:
        raise CheckpointError(f"{where} has invalid model settings: {str(error)[:_MAX_ERROR_CHARS]}") from error


def layout_of(state: Mapping[str, Any]) -> ParallelSettings | None:
    """Return the parallel settings of the run that saved a checkpoint, from `state`, the state in its manifest. Return
    None if they are missing or no longer valid.
    """
    run_settings = state.get("settings")
    parallel = run_settings.get("parallel") if isinstance(run_settings, dict) else None
    if not isinstance(parallel, dict) or len(parallel) > _MAX_MODEL_SETTINGS:
        return None
    try:
        return build_settings(ParallelSettings, parallel, "parallel")
    except LmtrainError:
        return None


def checked_model(contents: Contents) -> ModelSettings:
    """Return a checkpoint's model settings. Raise CheckpointError if they are invalid, if the checkpoint's tensors do
    not fit them, or if a tensor file is missing or has the wrong size.
    """
    model = model_of(contents.manifest.state, contents.path)
    if problems := fit_problems(contents.stored_manifest, model):
        raise CheckpointError(f"{contents.path / MANIFEST} contradicts itself: {'; '.join(problems)}. Restore it.")
    _check_file_sizes(contents)
    return model


def fit_problems(manifest: Manifest, model: ModelSettings) -> list[str]:
    """Return a message for each way in which the tensors in a manifest do not fit the model settings: missing or
    unknown names, wrong shapes, tied weights stored twice, or an incomplete average of the weights. Empty if they fit.

    The cost grows with the number of tensors, not with the size of the model in the settings, which may be damaged.
    """
    num_layers, num_tensors = model.shape.num_layers, len(manifest.tensors)
    if num_layers > max(_LAYERS_UNCHECKED, num_tensors):
        return [f"its model has {num_layers} layers and it holds {num_tensors} tensors"]
    shapes, first_names = unpadded_shapes(model), {tie.second: tie.first for tie in model.ties()}
    prefixes = (MODEL_PREFIX, AVERAGE_PREFIX) if holds_average(manifest) else (MODEL_PREFIX,)
    expected = {f"{prefix}{name}": shapes[name] for prefix in prefixes for name in shapes}
    # `optim.exp_avg.norm.weight` has the shape of `norm.weight`
    slots = {name: name.split(".", 2)[-1] for name in manifest.tensors if name.startswith(OPTIMIZER_PREFIX)}
    expected_slots = {name: shapes[weight] for name, weight in slots.items() if weight in shapes}
    tensors = {name: tensor for name, tensor in manifest.tensors.items() if name.startswith(prefixes)}
    second_names = {f"{prefix}{tie}": f"{prefix}{first_names[tie]}" for prefix in prefixes for tie in first_names}
    texts = (
        _describe_few(
            (name for name in second_names if name in tensors),
            lambda name: f"it holds {name}, which is tied to {second_names[name]} and is stored under that name alone",
        ),
        _describe_few(sorted(expected.keys() - tensors.keys()), lambda name: f"it has no {name}"),
        _describe_few(
            sorted(tensors.keys() - expected.keys() - second_names.keys()),
            lambda name: f"it holds {name}, which its model does not have. "
            f"{suggest_name(name.partition('.')[2], shapes)}",
        ),
        _describe_few(
            (n for n, shape in (expected | expected_slots).items()
             if n in manifest.tensors and manifest.tensors[n].shape != shape),
            lambda name: f"{name} has shape {list(manifest.tensors[name].shape)} and the model says "
            f"{list((expected | expected_slots)[name])}",
        ),
        _describe_few(
            (n for n, t in tensors.items() if n.startswith(AVERAGE_PREFIX) and t.dtype != AVERAGE_DTYPE),
            lambda name: f"{name} has the type {tensors[name].dtype}, and an average has {AVERAGE_DTYPE}",
        ),
        _padding_problem(model, shapes),
    )
    return [text for text in texts if text]


def _describe_few(names: Iterable[str], describe: Callable[[str], str]) -> str:
    """Return a text of the first few names, each worded by `describe`, and the number of the rest; "" for none.

    because: to word each of a hundred thousand names would take hours
    """
    names = list(names)
    return join_few([describe(name) if number < 4 else name for number, name in enumerate(names)], "; ")


def _padding_problem(model: ModelSettings, shapes: Mapping[str, Shape]) -> str:
    """Return a message if the rows that pad the vocabulary would hold more numbers than all weights of the model and
    more than 16 million, else "". `shapes` are the weights' shapes without padding.

    because: padding rows are in no file, so file sizes do not bound them
    """
    true_numbers, padded_numbers = (sum(map(math.prod, weights.values())) for weights in (shapes, model.weights()))
    if padded_numbers - true_numbers <= max(true_numbers, _PADDING_UNCHECKED):
        return ""
    num_padding = padded_numbers - true_numbers
    return f"the rows that pad its vocabulary would be {num_padding} numbers, more than its weights are"


def _check_file_sizes(contents: Contents) -> None:
    """Raise CheckpointError if a tensor file is missing or has another size than the manifest says. No file is read."""
    manifest = contents.manifest
    for name in sorted({piece.file for tensor in manifest.tensors.values() for piece in tensor.pieces}):
        try:
            status = os.lstat(contents.path / name)
            size = status.st_size if stat.S_ISREG(status.st_mode) else None
        except OSError:
            size = None
        if size != manifest.files[name].size:
            raise CheckpointError(
                f"{contents.path / name} {'is missing or no plain file' if size is None else f'has {size} bytes'}; "
                f"according to the manifest it has {manifest.files[name].size} bytes. Restore it from a copy."
            )
