"""Merged checkpoints as text: how they were made, and of which checkpoints. Called by inspect, runs and report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.find_and_prune import load_manifest
from lmtrain.checkpoint.recorded_merge_parents import MergeRecord, merge_record
from lmtrain.errors import LmtrainError, join_few
from lmtrain.runfolder.lineage import MERGED, WEIGHTS


def read_merge(folder: Path) -> MergeRecord | None:
    """Return how the checkpoint in a folder was merged; None if there is none, if it was not merged, or if it cannot be
    read.
    """
    try:
        return merge_record(load_manifest(folder).state, folder / MANIFEST) if is_checkpoint(folder) else None
    except LmtrainError:
        return None


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint's manifest; False if it may not be entered."""
    return os.path.isfile(folder / MANIFEST)  # because: Path.is_file raises in a folder that may not be entered


def merge_lines(merged: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for a merge, as `MergeRecord.to_dict` describes it: the mean and the moments, then a line for
    each parent, the newest first.
    """
    kept = "the newest parent's" if merged["moments"] == "newest" else "none"
    yield "merged", f"{merged['summary']}; moments of the optimizer: {kept}"
    for parent in reversed(merged["parents"]):
        gone = "" if Path(parent["checkpoint"]).exists() else ", which is gone"
        yield f"weight {parent['weight']:.4f}", f"{parent['checkpoint']}, step {parent['step']:,}{gone}"


def describe_merge(folder: Path) -> str:
    """Return a clause about the merged checkpoint in a folder, with the runs of its parents other than the newest's; "a
    merged checkpoint" if it is gone.
    """
    record = read_merge(folder)
    if record is None:
        return "a merged checkpoint"
    others = [*dict.fromkeys(parent.run for parent in record.parents if parent.run != record.parents[-1].run)]
    return record.summary + (f", some of {join_few(others, max_shown=3)}" if others else "")


def describe_origin(lineage: Sequence[Mapping[str, Any]]) -> str:
    """Return a clause about the checkpoint from which a run began, the last entry of its `lineage`, such as "the
    weights of runs/a at step 40"; for a merged checkpoint it says how that was made.
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
