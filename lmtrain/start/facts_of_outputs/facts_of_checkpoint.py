"""The facts about a checkpoint, and the differences between two, as plain data."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.checkpoint.compare_or_verify_checkpoints import (
    missing_names,
    raise_problems,
    type_differences,
    value_differences,
    verify_checkpoints,
)
from lmtrain.checkpoint.disk.checkpoint_format import ITEM_BYTES, MANIFEST
from lmtrain.checkpoint.find_and_prune import resolve_checkpoint
from lmtrain.checkpoint.read_merge_record import merge_record
from lmtrain.checkpoint.read_verified_contents import Contents, layout_of
from lmtrain.checkpoint.view_with_ema_as_weights import WeightSet, average_facts
from lmtrain.runfolder.lineage import parse_lineage
from lmtrain.runfolder.run_facts import facts_of_checkpoint
from lmtrain.runfolder.settings_differences import differences
from lmtrain.train.run_config import config_of_checkpoint

if TYPE_CHECKING:
    pass



def checkpoint_facts(path: Path, verify: bool, weights: WeightSet = "model") -> dict[str, Any]:
    """Return the contents of a checkpoint's manifest as a dict of JSON values: step, layout, model, settings, files,
    tensors, and how it was merged or averaged. With `verify`, first check all its files and raise an error if any is
    damaged. With `weights` "ema", describe the averaged weights in place of the weights.
    """
    if verify:
        raise_problems(verify_checkpoints(path))
    contents = Contents(path, weights=weights)
    manifest, place = contents.manifest, path / MANIFEST
    state, parallel = manifest.state, layout_of(manifest.state)
    now = facts_of_checkpoint(config_of_checkpoint(state), state | {"step": manifest.step})
    tensors: dict[str, dict[str, Any]] = {
        name: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "bytes": math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype],
            "files": sorted({piece.file for piece in tensor.pieces}),
        }
        for name, tensor in sorted(manifest.tensors.items())
    }
    return {
        "checkpoint": str(path),
        "verified": verify,
        **now.to_dict(),
        "facts": now,
        "samples": state.get("samples"),
        "layout": parallel.layout_text if parallel else None,
        "digest": manifest.digest,
        "parameters": sum(math.prod(t["shape"]) for name, t in tensors.items() if name.startswith("model.")),
        "bytes": sum(entry.size for entry in manifest.files.values()),
        "model": state.get("model"),
        "tokenizer": state.get("tokenizer"),
        "settings": state.get("settings"),
        "lineage": [parent.to_dict() for parent in parse_lineage(state.get("lineage"), place)],
        **contents.describe_weights(),
        "average": average.to_dict() if (average := average_facts(state, place)) else None,
        "merged": record.to_dict() if (record := merge_record(state, place)) else None,
        "files": {name: entry.size for name, entry in manifest.files.items()},
        "tensors": tensors,
    }


def difference_facts(path: Path, other: Path, weights: WeightSet = "model") -> dict[str, Any]:
    """Return the differences between two checkpoints as a dict of JSON values: training state, tensors that only one of
    them has, dtypes or shapes, and tensor values. With `weights` "ema", compare the averaged weights.
    """
    a, b = (Contents(resolve_checkpoint(folder), weights=weights) for folder in (path, other))
    only_a, only_b = missing_names(a, b)
    facts: dict[str, Any] = {
        "checkpoint": str(a.path),
        "other": str(b.path),
        **a.describe_weights(),
        "state": dict(sorted(differences(_comparable_states(a, b)).items())),
        "only_in_checkpoint": only_a,
        "only_in_other": only_b,
        "kinds": {name: list(pair) for name, pair in type_differences(a, b).items()},
        "values": {name: asdict(difference) for name, difference in value_differences(a, b)},
    }
    facts["same_tensors"] = not any(facts[key] for key in ("only_in_checkpoint", "only_in_other", "kinds", "values"))
    facts["summary"] = _difference_summary(facts, len(a.manifest.tensors))
    return facts


def _difference_summary(facts: dict[str, Any], num_tensors: int) -> dict[str, Any]:
    """Return the numbers of tensors that are equal, that differ, and that only one checkpoint has, with the largest
    difference of a value and its tensor. `num_tensors` is the number of tensors of the first checkpoint.
    """
    num_different, num_only = len(facts["kinds"]) + len(facts["values"]), len(facts["only_in_checkpoint"])
    largest = max(facts["values"], key=lambda name: facts["values"][name]["largest"], default=None)
    return {
        "equal": num_tensors - num_only - num_different, "different": num_different,
        "only_in_checkpoint": num_only, "only_in_other": len(facts["only_in_other"]),
        "largest": None if largest is None else facts["values"][largest]["largest"], "largest_in": largest,
    }  # fmt: skip


def _comparable_states(a: Contents, b: Contents) -> list[dict[str, Any]]:
    """Return the training states that the manifests of checkpoints `a` and `b` record, as a list of two dicts. If
    exactly one checkpoint was merged, its record of the merge is shortened to one clause, so that a comparison shows
    one difference for it.
    """
    states = [contents.manifest.state for contents in (a, b)]
    records = [merge_record(contents.manifest.state, contents.path / MANIFEST) for contents in (a, b)]
    if all(records):
        return states
    return [
        state | ({} if record is None else {"merged": record.summary})
        for state, record in zip(states, records, strict=True)
    ]
