"""Checkpoints looked through, part by part: what differs between two, and whether one holds what its manifest says.

Called by inspect, verify and the comparison of runs. None is ever whole in memory. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.checkpoint.contents import Contents, checked_model
from lmtrain.checkpoint.disk.boxes import cut, whole
from lmtrain.checkpoint.disk.format import DTYPES
from lmtrain.checkpoint.disk.tensor_file import Array
from lmtrain.checkpoint.store import list_broken, list_checkpoints, resolve
from lmtrain.errors import CheckpointError
from lmtrain.runfolder.names import CHECKPOINTS

PART_ITEMS = 4 << 20


@dataclass(frozen=True)
class ValueDifference:
    """Of two tensors of one name, type and shape."""

    num_different: int  # numbers whose bits are not the same
    num_values: int
    largest: float  # difference; infinite where one of the two is not finite
    scale: float  # the largest finite magnitude of the first


def missing(a: Contents, b: Contents) -> tuple[list[str], list[str]]:
    """Names that only the first has, and that only the second has."""
    ours, theirs = a.manifest.tensors.keys(), b.manifest.tensors.keys()
    return sorted(ours - theirs), sorted(theirs - ours)


def different_kinds(a: Contents, b: Contents) -> dict[str, tuple[str, str]]:
    """Tensors of both that have another type or shape in each."""
    kinds = [{n: f"{t.dtype} {list(t.shape)}" for n, t in c.manifest.tensors.items()} for c in (a, b)]
    return {
        name: (kinds[0][name], kinds[1][name])
        for name in kinds[0]
        if kinds[1].get(name, kinds[0][name]) != kinds[0][name]
    }


def different_values(a: Contents, b: Contents) -> Iterator[tuple[str, ValueDifference]]:
    """Tensors that are alike in all but their numbers."""
    for name, tensor in a.manifest.tensors.items():
        other = b.manifest.tensors.get(name)
        if other is not None and (other.dtype, other.shape) == (tensor.dtype, tensor.shape):
            found = _compare(a, b, name)
            if found.num_different:
                yield name, found


def _compare(a: Contents, b: Contents, name: str) -> ValueDifference:
    tensor = a.tensor(name)
    num_different, largest, scale = 0, 0.0, 0.0
    for part in cut(whole(tensor.shape), PART_ITEMS):
        ours, theirs = a.read_bits(name, part), b.read_bits(name, part)
        different = ours != theirs
        num_different += int(np.count_nonzero(different))
        left, right = _numbers(ours, tensor.dtype), _numbers(theirs, tensor.dtype)
        scale = max(scale, float(np.abs(left, where=np.isfinite(left), out=np.zeros_like(left)).max()))
        if different.any():
            with np.errstate(invalid="ignore", over="ignore"):
                gaps = np.abs(left[different] - right[different])
            largest = max(largest, float(np.where(np.isnan(gaps), math.inf, gaps).max()))
    return ValueDifference(num_different, math.prod(tensor.shape), largest, scale)


def _numbers(bits: Array, dtype: str) -> Array:
    """Return the values of raw bits as floats that hold them exactly."""
    if dtype == "BF16":  # because: a bfloat16 is the upper half of a float32
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(np.dtype(DTYPES[dtype]).newbyteorder("<")).astype(np.float64)


def verify_checkpoints(path: Path) -> Iterator[dict[str, Any]]:
    """Verify a checkpoint, or all checkpoints of a run's folder."""
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    return map(verify_checkpoint, [*list_checkpoints(folder), *list_broken(folder)] or [resolve(path)])


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds, and its problems."""
    facts: dict[str, Any] = {"checkpoint": str(path), "problems": []}
    try:
        contents = Contents(path)
        manifest = contents.manifest
        facts |= {
            "step": manifest.step,
            "tensors": len(manifest.tensors),
            "files": len(manifest.files),
            "bytes": sum(entry.size for entry in manifest.files.values()),
        }
        facts["problems"] = contents.damages()
        if not facts["problems"] and "model" in manifest.state:
            checked_model(contents)
    except CheckpointError as error:
        facts["problems"] = [str(error)]
    return facts


def refuse_problems(found: Iterable[dict[str, Any]]) -> None:
    """Name what is damaged, and how a run goes on from its newest checkpoint that is whole."""
    found = list(found)
    problems = [problem for facts in found for problem in facts["problems"]]
    if not problems:
        return
    path, sound = Path(found[0]["checkpoint"]), [facts["checkpoint"] for facts in found if not facts["problems"]]
    if path.parent.name == CHECKPOINTS:
        run = path.parent.parent
        goes_on = f"`lmtrain pretrain --from-run {run} checkpoint.fallback=true`"
        if sound and sound[-1] == max(facts["checkpoint"] for facts in found):
            problems.append(f"The newest, {sound[-1]}, is whole: the run goes on from there as it is.")
        elif sound:
            problems.append(f"The newest that is whole is {sound[-1]}; {goes_on} goes on from there.")
        elif len(found) == 1 and len(list_checkpoints(path.parent)) > 1:
            problems.append(f"`lmtrain verify {run}` looks at all of its run.")
    raise CheckpointError("\n".join(problems))
