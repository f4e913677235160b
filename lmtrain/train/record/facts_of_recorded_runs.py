"""What a run is by what it has recorded in its folder. Torch-free.

Called by the commands and the Python interface that show runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.disk.checkpoint_format import MANIFEST
from lmtrain.checkpoint.find_and_prune import load_manifest
from lmtrain.runfolder.folder_reader import RunFolder
from lmtrain.runfolder.metrics_rows import (
    last_write_time,
    loss_warning,
    read_first_step,
    read_last_rows,
    rows_in_force,
    to_json_data,
)
from lmtrain.runfolder.run_facts import RunFacts, facts_of_checkpoint, facts_of_rows, finite_or_none
from lmtrain.train.run_config import config_of_checkpoint, readable_config


def facts_of_run(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], state: str) -> RunFacts:
    """Return what a run is by its recorded `settings` and its newest `rows` in force."""
    train = settings.get("train")
    steps = finite_or_none(train.get("steps")) if isinstance(train, dict) else None
    return facts_of_rows(readable_config(settings), rows, state, steps=steps)


def facts_of_saved_run(checkpoint: Path) -> RunFacts | None:
    """Return what a run was when it saved the checkpoint in this folder; None for a folder that is no checkpoint."""
    if not (checkpoint / MANIFEST).is_file():
        return None
    state = load_manifest(checkpoint).state
    return facts_of_checkpoint(config_of_checkpoint(state), state)


def row_of_run(run: RunFolder) -> dict[str, Any]:
    """Return a dict with the facts about a run for `lmtrain runs`: folder, state, step, losses, speed, time of its last
    metrics row, and why it stopped. Numbers that are not recorded are None, the step 0.
    """
    rows = rows_in_force(read_last_rows(run.metrics))
    steps = [row for row in rows if row["event"] == "step"]
    last, valid = steps[-1] if steps else {}, [row for row in rows if row["event"] == "valid"]
    now = facts_of_run(run.settings, rows, run.state)
    warning = loss_warning(_first_row_of_stage(run, rows, now), last) if run.state == "finished" else ""
    return {
        "run": str(run.path), "name": run.name, **now.to_dict(),
        "loss": _loss_or_text(last), "loss/valid": _loss_or_text(valid[-1]) if valid else None,
        "last_row": last_write_time(rows, run.metrics), "why": run.end_reason or warning, "missing": run.problems,
    }


def _first_row_of_stage(run: RunFolder, rows: Sequence[dict[str, Any]], now: RunFacts) -> dict[str, Any]:
    """Return the first row of a step of the stage that a run is in, with which its loss is compared; {} if that is not
    among the newest `rows`, since losses of two stages are of different data.
    """
    if now.stage is None or now.stage.number == 1:
        return read_first_step(run.metrics)
    rows_of_stage = (row for row in rows if row["event"] == "step" and row.get("stage") == now.stage_name)
    is_there = any(row["event"] == "stage" and row.get("stage") == now.stage_name for row in rows)
    return next(rows_of_stage, {}) if is_there else {}


def _loss_or_text(row: dict[str, Any]) -> float | str | None:
    """Return a row's loss; NaN and infinities as text, since a run that reached one is not a run without a loss."""
    value = row.get("loss")
    return to_json_data(value) if type(value) in (int, float) else None
