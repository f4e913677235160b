"""Compare two checkpoints, and verify a checkpoint against its manifest, part by part.

Called by inspect, verify and the comparison of runs. No checkpoint is ever in memory as a whole. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.checkpoint.disk.checkpoint_format import DTYPES
from lmtrain.checkpoint.disk.safetensors_file import Array
from lmtrain.checkpoint.disk.tensor_slice_geometry import full_box, split_box
from lmtrain.checkpoint.find_and_prune import list_broken, list_checkpoints, resolve_checkpoint
from lmtrain.checkpoint.read_verified_contents import Contents, checked_model
from lmtrain.errors import CheckpointError
from lmtrain.runfolder.file_names import CHECKPOINTS

_PART_ITEMS = 4 << 20


@dataclass(frozen=True)
class ValueDifference:
    """The differences between the values of a tensor in two checkpoints."""

    num_different: int  # elements whose bits differ
    num_values: int
    largest: float  # absolute difference; infinite if an element is not finite in one of the two
    scale: float  # the largest finite magnitude in the first checkpoint


def missing_names(a: Contents, b: Contents) -> tuple[list[str], list[str]]:
    """Return the tensor names that only `a` has, and those that only `b` has, sorted."""
    names_a, names_b = a.manifest.tensors.keys(), b.manifest.tensors.keys()
    return sorted(names_a - names_b), sorted(names_b - names_a)


def type_differences(a: Contents, b: Contents) -> dict[str, tuple[str, str]]:
    """Return name -> (type and shape in `a`, type and shape in `b`) of each tensor that both checkpoints have, in
    different types or shapes.
    """
    kinds = [{n: f"{t.dtype} {list(t.shape)}" for n, t in c.manifest.tensors.items()} for c in (a, b)]
    return {
        name: (kinds[0][name], kinds[1][name])
        for name in kinds[0]
        if kinds[1].get(name, kinds[0][name]) != kinds[0][name]
    }


def value_differences(a: Contents, b: Contents) -> Iterator[tuple[str, ValueDifference]]:
    """Yield (name, difference) of each tensor that both checkpoints have with the same type and shape but with
    different values.
    """
    for name, tensor in a.manifest.tensors.items():
        counterpart = b.manifest.tensors.get(name)
        if counterpart is not None and (counterpart.dtype, counterpart.shape) == (tensor.dtype, tensor.shape):
            difference = _compare_values(a, b, name)
            if difference.num_different:
                yield name, difference


def _compare_values(a: Contents, b: Contents, name: str) -> ValueDifference:
    tensor = a.tensor(name)
    num_different, largest, scale = 0, 0.0, 0.0
    for part in split_box(full_box(tensor.shape), _PART_ITEMS):
        bits_a, bits_b = a.read_bits(name, part), b.read_bits(name, part)
        different = bits_a != bits_b
        num_different += int(np.count_nonzero(different))
        values_a, values_b = _to_floats(bits_a, tensor.dtype), _to_floats(bits_b, tensor.dtype)
        scale = max(scale, float(np.abs(values_a, where=np.isfinite(values_a), out=np.zeros_like(values_a)).max()))
        if different.any():
            with np.errstate(invalid="ignore", over="ignore"):
                gaps = np.abs(values_a[different] - values_b[different])
            largest = max(largest, float(np.where(np.isnan(gaps), math.inf, gaps).max()))
    return ValueDifference(num_different, math.prod(tensor.shape), largest, scale)


def _to_floats(bits: Array, dtype: str) -> Array:
    """Return elements of a tensor as float64 values. `bits` are integers that hold the elements' bits, `dtype` is the
    safetensors name of their type, such as "BF16".
    """
    if dtype == "BF16":  # because: a bfloat16 is the upper half of a float32
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(np.dtype(DTYPES[dtype]).newbyteorder("<")).astype(np.float64)


def verify_checkpoints(path: Path) -> Iterator[dict[str, Any]]:
    """Verify a checkpoint, or all checkpoints of a run's folder; yield a report for each."""
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    return map(verify_checkpoint, [*list_checkpoints(folder), *list_broken(folder)] or [resolve_checkpoint(path)])


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Verify a checkpoint by reading every byte. Return a dict with its path ("checkpoint"), a list of messages
    ("problems") and, if its manifest can be read, "step", "tensors", "files" (their numbers) and "bytes".
    """
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
        facts["problems"] = contents.find_damage()
        if not facts["problems"] and "model" in manifest.state:
            checked_model(contents)
    except CheckpointError as error:
        facts["problems"] = [str(error)]
    return facts


def raise_problems(reports: Iterable[dict[str, Any]]) -> None:
    """Raise CheckpointError with all problems of reports by `verify_checkpoint`; do nothing if there are none. For
    checkpoints of a run, the message also says how to resume from an intact checkpoint.
    """
    reports = list(reports)
    problems = [problem for report in reports for problem in report["problems"]]
    if not problems:
        return
    path = Path(reports[0]["checkpoint"])
    intact = [report["checkpoint"] for report in reports if not report["problems"]]
    if path.parent.name == CHECKPOINTS:
        run = path.parent.parent
        fallback_command = f"`lmtrain pretrain --from-run {run} checkpoint.fallback=true`"
        if intact and intact[-1] == max(report["checkpoint"] for report in reports):
            problems.append(f"The newest, {intact[-1]}, is intact: the run resumes from it.")
        elif intact:
            problems.append(f"The newest intact checkpoint is {intact[-1]}; {fallback_command} resumes from it.")
        elif len(reports) == 1 and len(list_checkpoints(path.parent)) > 1:
            problems.append(f"`lmtrain verify {run}` verifies all checkpoints of the run.")
    raise CheckpointError("\n".join(problems))
