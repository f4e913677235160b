"""The facts about a run and its stages, read from its folder, as plain data. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.find_and_prune import best_checkpoint, list_broken, list_checkpoints, list_damaged
from lmtrain.errors import MissingInputError
from lmtrain.observe.screen.metrics_row_text import (
    smoothed_loss,
)
from lmtrain.runfolder.file_names import CHECKPOINTS, ENVIRONMENT, METRICS, step_from_name
from lmtrain.runfolder.folder_reader import read_run_state, read_settings
from lmtrain.runfolder.lineage import read_lineage
from lmtrain.runfolder.metrics_rows import last_write_time, read_metrics
from lmtrain.runfolder.settings_differences import changed_histories
from lmtrain.runfolder.tensorboard_metric_names import row_measures, score_by_step
from lmtrain.runtime.files.atomic_files import read_json
from lmtrain.train.record.facts_of_recorded_runs import facts_of_run
from lmtrain.train.run_config import readable_config

Rows = Sequence[dict[str, Any]]


def run_facts(path: Path, verify: bool) -> dict[str, Any]:
    """Return the records of a run folder as a dict of JSON values: state, newest metrics rows, best results, names of
    checkpoints, settings and more. With `verify`, first check all files of its checkpoints and raise an error if any is
    damaged.
    """
    import numpy as np

    from lmtrain.checkpoint.compare_or_verify_checkpoints import raise_problems, verify_checkpoints
    from lmtrain.observe.history.read_metrics_columns import read_record

    if verify:
        raise_problems(verify_checkpoints(path))
    metrics = path / METRICS
    rows = read_metrics(metrics) if metrics.is_file() else []
    events = ("step", "valid", "eval", "save")
    steps, valid, evals, saves = ([row for row in rows if row["event"] == event] for event in events)
    losses = [row["loss"] for row in steps if row.get("loss") is not None]
    state, settings = read_run_state(path), read_settings(path)
    now = facts_of_run(settings, rows, state["state"])
    return {
        "run": str(path),
        "verified": verify,
        **state,
        "stopped": state["stopped"] or "still running, or killed",
        **now.to_dict(),
        "facts": now,
        "last_step": steps[-1] if steps else None,
        "last_validation": valid[-1] if valid else None,
        "best_validation": min((row for row in valid if row.get("loss") is not None), key=_loss_or_inf, default=None),
        "last_evaluations": {row["name"]: row for row in evals},
        "best_evaluations": _best_evaluations(evals),
        "best_checkpoint": _best_checkpoint(path, settings, rows),
        "last_save": saves[-1] if saves else None,
        "last_row_time": last_write_time(rows, metrics) if rows else None,
        "smoothed_loss": smoothed_loss(losses),
        "losses": losses,
        "elapsed_s": float(np.nanmax(read_record(metrics).columns["seconds"], initial=0.0)),  # of all starts
        "layout": layout_text(settings),
        "lineage": [parent.to_dict() for parent in read_lineage(path)],
        "checkpoints": [checkpoint.name for checkpoint in list_checkpoints(path / CHECKPOINTS)],
        "damaged": [
            checkpoint.name
            for list_folders in (list_broken, list_damaged)
            for checkpoint in list_folders(path / CHECKPOINTS)
        ],
        "environment": _environment(path, rows),
        "settings_digest": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12],
        "settings": settings,
        "changed": changed_histories(row for row in rows if row["event"] == "start"),
    }


def _environment(path: Path, rows: Rows) -> dict[str, Any]:
    """Return the machine and the versions of a run's newest start, as far as its folder tells them, and when that was.
    """
    recorded = read_json(path / ENVIRONMENT) if (path / ENVIRONMENT).is_file() else None
    started = next((row.get("time") for row in reversed(rows) if row["event"] == "start"), None)
    return {**(recorded if isinstance(recorded, dict) else {}), "started": started}


def _loss_or_inf(row: dict[str, Any]) -> float:
    loss = float(row["loss"])
    return loss if loss == loss else float("inf")  # because: no number is below a NaN, so that `min` would choose it


def _best_evaluations(rows: Rows) -> dict[str, dict[str, Any]]:
    """Return a dict that maps the name of each evaluation to the metrics row in which its headline measure was best.
    `rows` are evaluation rows; with equal results the earliest step counts.
    """
    names = {row["name"]: f"eval/{row['name']}/{row['headline']}" for row in rows}
    scores = {name: score_by_step(rows, measure) for name, measure in names.items()}
    best = {name: max(by_step, key=lambda step: (by_step[step], -step)) for name, by_step in scores.items() if by_step}
    return {row["name"]: row for row in rows if best.get(row["name"]) == row["step"]}


def _best_checkpoint(path: Path, settings: dict[str, Any], rows: Rows) -> dict[str, Any] | None:
    """Return the best checkpoint's `name`, the measure `by` which it is the best (the setting checkpoint.best_by), and
    that measure's `value`. Return None if checkpoint.keep_best is off or there is no best checkpoint yet.
    """
    if not settings.get("checkpoint", {}).get("keep_best"):
        return None
    try:
        name = best_checkpoint(path).name
    except MissingInputError:
        return None
    measure = settings["checkpoint"]["best_by"]
    step = step_from_name(name)
    value = next(all_of[measure] for row in rows if row["step"] == step and measure in (all_of := row_measures(row)))
    return {"name": name, "by": measure, "value": value}


def layout_text(settings: Mapping[str, Any]) -> str | None:
    """Return the parallel layout in a run's `settings` in words; None if this version cannot read them."""
    config = readable_config(settings)
    return config.parallel.layout_text if config is not None else None
