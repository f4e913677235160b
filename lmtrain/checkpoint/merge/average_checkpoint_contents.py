"""The mean of several checkpoints as the tensors, files and state of one checkpoint. Torch-free.

Called by the merge command; `reshard.write_checkpoint` reads it part by part, as it reads a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST, Manifest, TensorEntry
from lmtrain.checkpoint.disk.safetensors_file import Array, PieceSpec
from lmtrain.checkpoint.disk.tensor_slice_geometry import Box, full_box
from lmtrain.checkpoint.read_merge_record import MergeParent, MergeRecord
from lmtrain.checkpoint.read_verified_contents import Contents
from lmtrain.checkpoint.reshard.reshard_tensors import MERGE
from lmtrain.checkpoint.view_with_ema_as_weights import AVERAGE_PREFIX, MODEL_PREFIX, OPTIMIZER_PREFIX, holds_average
from lmtrain.runfolder.lineage import MERGED, Parent, file_sha256, run_of_checkpoint

COPIES = 3  # of a part of a tensor that a worker holds: as read, and the sum in float64, which takes two
_CHUNK = 1 << 15  # because: numbers that are summed at a time, with their sum in float64, fit into a core's cache


@dataclass(frozen=True)
class MergedContents:
    """A checkpoint that is the newest of `parents`, which are given oldest first, with the mean of all their weights.

    `shares` are by parent and add up to 1, `mean` is the name of the mean. With `keeps_moments` the optimizer's state
    is the newest's, else it is left out, and so is any average that a parent's run has kept.
    """

    parents: Sequence[Contents]
    shares: Sequence[float]
    mean: str
    keeps_moments: bool

    @property
    def newest(self) -> Contents:
        return self.parents[-1]

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest for the merged checkpoint: that of the newest parent, without the tensors that the merge leaves
        out.
        """
        manifest = self.newest.manifest
        dropped = (AVERAGE_PREFIX,) if self.keeps_moments else (AVERAGE_PREFIX, OPTIMIZER_PREFIX)
        return replace(manifest, tensors={n: t for n, t in manifest.tensors.items() if not n.startswith(dropped)})

    @cached_property
    def identity(self) -> str:
        """A digest of the parents, their order and shares, and of what is kept."""
        parts = [[p.identity, share] for p, share in zip(self.parents, self.shares, strict=True)]
        return hashlib.sha256(json.dumps(["merge", parts, self.mean, self.keeps_moments]).encode()).hexdigest()

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(parent.path for parent in self.parents)

    @property
    def extra_names(self) -> list[str]:
        return self.newest.extra_names

    def read_file(self, name: str) -> bytes:
        """Return the bytes of an extra file of the newest checkpoint, verified."""
        return self.newest.read_file(name)

    def tensor(self, name: str) -> TensorEntry:
        return self.newest.tensor(name)

    def read_bits(self, name: str, box: Box | None = None) -> Array:
        """Return a tensor of the merged checkpoint, or its rectangular part `box`, as integers that hold the bits of
        its elements. Weights are summed in float64 in the order of the parents and rounded once; other tensors are the
        newest parent's.
        """
        # because: one checkpoint stays as it is, NaN and all
        if not name.startswith(MODEL_PREFIX) or len(self.parents) == 1:
            return self.newest.read_bits(name, box)
        box = box or full_box(self.tensor(name).shape)
        bits = np.empty(box.shape, np.dtype("<i4"))
        values = bits.reshape(-1).view(np.dtype("<f4"))
        total, product = np.empty(values.size), np.empty(min(_CHUNK, values.size))
        with np.errstate(invalid="ignore"):  # because: a weight that is no number stays one, as everywhere
            for number, (parent, share) in enumerate(zip(self.parents, self.shares, strict=True)):
                parent.read_bits(name, box, bits)
                for start in range(0, values.size, _CHUNK):
                    part, sums = values[start : start + _CHUNK], total[start : start + _CHUNK]
                    weighted = np.multiply(part, share, out=product[: part.size] if number else sums, dtype=np.float64)
                    if number:
                        sums += weighted
            values[...] = total
        return bits

    def files(self) -> dict[str, list[PieceSpec]]:
        """Return file name -> pieces (tensors or rectangular parts of them) for the tensor files of the merged
        checkpoint. Files and order are those of the newest parent.
        """
        placed: dict[str, list[tuple[int, PieceSpec]]] = {}  # file name -> (first byte, piece)
        for name, tensor in self.manifest.tensors.items():
            for piece in tensor.pieces:
                spec = PieceSpec(name, tensor.dtype, tensor.shape, piece.box)
                placed.setdefault(piece.file, []).append((self.newest.first_byte(name, piece), spec))
        return {file: [spec for _, spec in sorted(placed[file], key=lambda pair: pair[0])] for file in sorted(placed)}

    def state(self) -> dict[str, Any]:
        """Return the state for the manifest of the merged checkpoint: that of the newest parent, with a record of all
        parents, and with this merge as a further entry of its lineage.
        """
        digests = [file_sha256(parent.path / MANIFEST) for parent in self.parents]
        state: Mapping[str, Any] = self.newest.manifest.state
        left_out = {"ema", "resharded"} | (set() if self.keeps_moments else {"optimizer"})
        lineage = Parent.of_checkpoint(MERGED, self.newest.path, self.manifest.step, digests[-1])
        parents = tuple(
            MergeParent(
                run=str(run_of_checkpoint(parent.path.resolve())), checkpoint=str(parent.path.resolve()),
                step=parent.manifest.step, manifest_sha256=digest, weight=share,
            )
            for parent, digest, share in zip(self.parents, digests, self.shares, strict=True)
        )  # fmt: skip
        record = MergeRecord(mean=self.mean, moments="newest" if self.keeps_moments else "none", parents=parents)
        return {key: value for key, value in state.items() if key not in left_out} | {
            "lineage": [*state.get("lineage", ()), lineage.to_dict()], MERGE.record: asdict(record),
        }  # fmt: skip

    @property
    def averages_left_out(self) -> list[str]:
        """The paths of the parents whose run has kept an average of its weights, which is not merged."""
        return [str(parent.path) for parent in self.parents if holds_average(parent.manifest)]


def has_moments(contents: Contents) -> bool:
    """Return whether a checkpoint holds the state of an optimizer."""
    manifest = contents.manifest
    return "optimizer" in manifest.state or any(name.startswith(OPTIMIZER_PREFIX) for name in manifest.tensors)
