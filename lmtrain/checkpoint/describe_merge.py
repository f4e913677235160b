"""Merged checkpoints as text: how they were made, and of which checkpoints. Called by inspect, runs and report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.find_and_prune import load_manifest
from lmtrain.checkpoint.read_merge_record import MergeRecord, merge_record
from lmtrain.errors import LmtrainError, join_few
from lmtrain.runfolder.lineage import MERGED, WEIGHTS


def read_merge(folder: Path) -> MergeRecord | None:
    """Return the record of how the checkpoint in `folder` was merged from others. Return None if the folder holds no
    checkpoint, one that was not merged, or one that cannot be read.
    """
    try:
        return merge_record(load_manifest(folder).state, folder / MANIFEST) if is_checkpoint(folder) else None
    except LmtrainError:
        return None


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint's manifest; False if it may not be entered."""
    return os.path.isfile(folder / MANIFEST)  # because: Path.is_file raises in a folder that may not be entered


def merge_lines(merged: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) lines for printing about a merge, given as the dict of `MergeRecord.to_dict`: first the way of
    averaging and the optimizer's moments, then the weight and path of each merged checkpoint, the newest first.
    """
    kept = "the newest parent's" if merged["moments"] == "newest" else "none"
    yield "merged", f"{merged['summary']}; moments of the optimizer: {kept}"
    for parent in reversed(merged["parents"]):
        gone = "" if Path(parent["checkpoint"]).exists() else ", which is gone"
        yield f"weight {parent['weight']:.4f}", f"{parent['checkpoint']}, step {parent['step']:,}{gone}"


def describe_merge(folder: Path) -> str:
    """Return a clause in words about how the checkpoint in `folder` was merged; checkpoints of several runs add the
    names of the other runs. Return "a merged checkpoint" if the folder or its record is gone.
    """
    record = read_merge(folder)
    if record is None:
        return "a merged checkpoint"
    others = [*dict.fromkeys(parent.run for parent in record.parents if parent.run != record.parents[-1].run)]
    return record.summary + (f", some of {join_few(others, max_shown=3)}" if others else "")


def describe_origin(lineage: Sequence[Mapping[str, Any]]) -> str:
    """Return a clause about the checkpoint from which a run began, such as "the weights of runs/a at step 40" or a
    description of a merge. `lineage` lists the run's ancestor checkpoints as dicts, oldest first; it must not be empty.
    """
    parent, earlier = lineage[-1], lineage[:-1]
    if parent["kind"] == MERGED:
        return f"a merge, whose newest checkpoint is of {parent['run']} at step {parent['step']:,}"
    is_average = [*parent["differences"].get("checkpoint.init_weights", [])][-1:] == ["ema"]
    weights = ("the average in " if is_average else "the weights of ") * (parent["kind"] == WEIGHTS)
    place = f"{parent['run']} at step {parent['step']:,}"
    # because: the entry before that of a merged checkpoint is its newest parent
    if earlier and earlier[-1]["kind"] == MERGED:
        return f"{weights}{place}, {describe_merge(Path(parent['checkpoint']))}"
    return f"{weights}{place}"
