"""Read tensors from a checkpoint at any layout. Called by resume, evaluation and conversion.

A run requests its pieces; the checkpoint's pieces may be split differently. Names, types and shapes of all requested
pieces are compared before the first byte is read, and every byte is verified before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lmtrain.checkpoint.disk.checkpoint_format import DTYPES, dtype_code
from lmtrain.checkpoint.disk.safetensors_file import Array, piece_box
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box
from lmtrain.checkpoint.read_verified_contents import Contents, suggest_name
from lmtrain.checkpoint.view_with_ema_as_weights import WeightSet
from lmtrain.errors import CheckpointError, join_few
from lmtrain.layout import Piece

_PART_ITEMS = 16 << 20  # elements of a piece that are read at a time, if they are converted
_CACHED_BLOCKS = 4  # because: a piece is read in one go, and only its neighbour needs the rest of its last block
_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CheckpointReader(Contents):
    """A checkpoint's contents with its tensors, whole or in parts, as torch's. With `weights` "ema", the weights that
    are read are their average.
    """

    def __init__(self, path: Path | str, weights: WeightSet = "model") -> None:
        super().__init__(Path(path), _CACHED_BLOCKS, weights)
        self.state, self.step = self.manifest.state, self.manifest.step

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return _torch_dtype(self.tensor(name).dtype)

    def read(self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """Return a tensor, or the part of it that begins at the index `offset` and has the shape `shape`. Without
        `offset` the part begins at the tensor's beginning, without `shape` it goes to the tensor's end.
        """
        full = self.shape(name)
        begin = tuple(offset) if offset is not None else (0,) * len(full)
        if len(begin) != len(full) or (shape is not None and len(shape) != len(full)):
            raise CheckpointError(
                f"The tensor {name} in {self.path} has {len(full)} axes. Give offset and shape as many numbers."
            )
        extent = tuple(shape) if shape is not None else tuple(n - o for n, o in zip(full, begin, strict=True))
        return _as_tensor(self.read_bits(name, Box(begin, extent)), self.dtype(name))

    def load_into(self, pieces: Iterable[Piece], *, allow_rounding: bool = False) -> None:
        """Fill the data of the pieces (`Piece.block`, a tensor or array) with the checkpoint's values. Raise
        CheckpointError if a name, shape or type differs; with `allow_rounding` a floating-point type may differ.

        After an error about damage some blocks are filled and some not: do not use them.
        """
        pieces = list(pieces)
        problems = self._mismatches(pieces, allow_rounding)
        if problems:
            raise CheckpointError(f"{self.path} does not fit this run: " + "; ".join(problems) + f". {self._way_out()}")
        for piece in pieces:
            if (bits := self._directly_readable(piece)) is not None:
                self.read_bits(piece.name, piece_box(piece), bits)
                continue
            for box, block in _split_rows(piece_box(piece), piece.block):
                _fill(block, _as_tensor(self.read_bits(piece.name, box), self.dtype(piece.name)))

    def read_extra_files(self, prefix: str = "") -> dict[str, bytes]:
        """Return the extra files whose names begin with `prefix`, by name, verified."""
        return {name: self.read_file(name) for name in self.extra_names if name.startswith(prefix)}

    def _directly_readable(self, piece: Piece) -> Array | None:
        """Return the memory of a piece's data as an integer array if the checkpoint's bytes can be read straight into
        it, because it is a contiguous CPU tensor of the same type. Else return None.
        """
        block = piece.block
        if not isinstance(block, Tensor) or dtype_code(block) != self.manifest.tensors[piece.name].dtype:
            return None
        is_plain = block.device.type == "cpu" and block.is_contiguous() and block.ndim > 0
        return block.view(_CARRIERS[block.element_size()]).numpy() if is_plain else None

    def _mismatches(self, pieces: list[Piece], allow_rounding: bool) -> list[str]:
        """Return messages for the pieces whose tensor the checkpoint does not have, or has in another shape or type.
        With `allow_rounding` floating-point types may differ.
        """
        stored, requested = self.manifest.tensors, {piece.name for piece in pieces}
        missing, problems = sorted(requested - stored.keys()), []
        if missing:
            unused = stored.keys() - requested
            hint = f" ({suggest_name(missing[0], unused)})" if unused else ""
            problems.append(f"it has no {join_few(missing)}{hint}")
        known = [piece for piece in pieces if piece.name in stored]
        mismatches = [text for piece in known for text in self._mismatch(piece, allow_rounding)]
        if mismatches:
            problems.append(join_few(mismatches, "; "))
        return problems

    def _mismatch(self, piece: Piece, allow_rounding: bool) -> list[str]:
        """Return a list with a message if the checkpoint's tensor has another shape or type than the piece expects,
        else an empty list. With `allow_rounding` floating-point types may differ.
        """
        entry = self.manifest.tensors[piece.name]
        shape, dtype = tuple(piece.global_shape), dtype_code(piece.block)
        if entry.shape != shape:
            return [f"{piece.name} has shape {list(entry.shape)} in the checkpoint, but {list(shape)} in the run"]
        if entry.dtype != dtype and not (allow_rounding and _is_floating(entry.dtype) and _is_floating(dtype)):
            return [f"{piece.name} is {DTYPES[entry.dtype]} in the checkpoint, but {DTYPES[dtype]} in the run"]
        box = piece_box(piece)
        if box.is_inside(entry.shape):
            return []
        return [
            f"{piece.name} has shape {list(shape)} and no part at {list(box.offset)} of shape {list(box.shape)}"
        ]

    def _way_out(self) -> str:
        model = self.state.get("model")
        if not isinstance(model, dict):
            return "Use the settings that the checkpoint was made with."
        words = ", ".join(f"{key}={value}" for key, value in model.items() if isinstance(value, (int, str)))
        return f"The checkpoint is of the model {words[:400]}. Use these settings or another checkpoint."


@torch.no_grad()
def _fill(block: Any, tensor: Tensor) -> None:
    """Copy the values of a tensor into `block`, the data of a piece, which is a numpy array or another tensor."""
    if isinstance(block, np.ndarray):
        block[...] = tensor.numpy()
    else:
        block.copy_(tensor)


def _split_rows(box: Box, block: Any) -> Iterator[tuple[Box, Any]]:
    """Split a piece of a tensor into parts of a few rows. Yield (place of the part in the tensor, its part of `block`).
    `box` is the place of the whole piece in the tensor, `block` is the piece's data.

    because: converted values are in memory twice, as read and as converted
    """
    if not box.shape:
        yield box, block
        return
    rows = max(1, _PART_ITEMS // max(1, math.prod(box.shape[1:])))
    for first in range(0, box.shape[0], rows):
        part = block[first : first + rows]
        yield Box((box.offset[0] + first, *box.offset[1:]), tuple(part.shape)), part


def _is_floating(code: str) -> bool:
    return _torch_dtype(code).is_floating_point


def _torch_dtype(code: str) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, DTYPES[code]))


def _as_tensor(bits: Array, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(bits).view(dtype)
